"""Which parameters of a policy are trained."""

from __future__ import annotations

from torch import nn

from mar_grpo.algorithms.config import Trained
from mar_grpo.errors import InputError
from mar_grpo.models.policy import Policy


def trained_parameters(policy: Policy, part: Trained) -> dict[str, nn.Parameter]:
    """Parameters of the part by their published names. InputError: the checkpoint's condition has none."""
    parameters = {
        "trunk": policy.trunk_parameters,
        "condition": policy.condition_parameters,
        "head": policy.head_parameters,
        "both": lambda: policy.trunk_parameters() + policy.head_parameters(),
    }[part]()
    if not parameters:
        raise InputError("the checkpoint's condition is frozen", where="algorithm.trained", hint="train the trunk")
    reached = {id(parameter) for parameter in parameters}
    return {name: value for name, value in policy.transformer.named_parameters() if id(value) in reached}
