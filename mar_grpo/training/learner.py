"""What an update changes: the policy, its optimiser, the average of its head, the reference that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mar_grpo.models.policy import Policy
from mar_grpo.training.lora import add_adapters, merge_adapters, without_adapters
from mar_grpo.training.optimization import Ema, make_optimizer, set_rate
from mar_grpo.training.parts import trained_parameters

if TYPE_CHECKING:
    from mar_grpo.config import Recipe


class Learner:
    """Prepares a start policy for a recipe, in place.

    Attributes:
        parameters: what is trained, by name within the transformer: of the part, or the adapters beside it.
        reference: what the KL is against; None where it is off.

    Raises:
        InputError: the policy lacks the part, or a layer that is to have an adapter.
    """

    def __init__(self, recipe: Recipe, policy: Policy, device: torch.device) -> None:
        algorithm, lora = recipe.algorithm, recipe.training.lora
        self.config, self.kl, self.policy = recipe.optimizer, algorithm.kl, policy
        policy.eval().requires_grad_(False).to(device)
        off = self.kl.kind == "off"
        self.reference: Policy | None = None
        if self.kl.reference == "adapter_off" and not off:
            self.reference = without_adapters(policy)
        if lora:
            self.parameters = add_adapters(policy, algorithm.trained, lora, recipe.seed)
        else:
            self.parameters = trained_parameters(policy, algorithm.trained)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        if self.kl.reference == "frozen" and not off:
            self.reference = policy.frozen_copy()
        reached = {id(parameter) for parameter in policy.head_parameters()}
        head = {name: value for name, value in self.parameters.items() if id(value) in reached}
        self.optimizer = make_optimizer(self.trained, self.config, list(head.values()))
        self.average = Ema(head, self.config.head_ema_decay) if self.config.head_ema_decay else None

    @property
    def trained(self) -> list[nn.Parameter]:
        """What is trained, in one order on all ranks."""
        return list(self.parameters.values())

    def clip(self) -> float:
        """Cut the gradient to `max_grad_norm`; returns its norm before."""
        return torch.nn.utils.clip_grad_norm_(self.trained, self.config.max_grad_norm).item()

    def set_rate(self, update: int) -> float:
        """Set and return the learning rate of update number `update` (from 0)."""
        return set_rate(self.optimizer, update, self.config)

    def end(self, update: int) -> None:
        """After the optimiser steps of update number `update` (from 0): the average and the reference follow."""
        if self.average:
            self.average.update(update)
        if self.kl.refresh_every and (update + 1) % self.kl.refresh_every == 0:
            with torch.no_grad():
                for name, value in self._reference().items():
                    value.copy_(self.parameters[name])

    @contextmanager
    def shown(self) -> Iterator[Policy]:
        """The policy as others see it: with the average of its head, where there is one."""
        if self.average:
            self.average.swap()
        try:
            yield self.policy
        finally:
            if self.average:
                self.average.swap()

    def finished(self) -> Policy:
        """The policy to publish; nothing can be trained after this."""
        if self.average:
            self.average.swap()
        self.reference = None  # it may share the weights that are written now
        if any(".lora_" in name for name in self.parameters):
            merge_adapters(self.policy)
        return self.policy

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs."""
        return {
            "parameters": _values(self.parameters),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.average if self.average else {},
            "reference": _values(self._reference()) if self.kl.refresh_every else {},
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as when `state` was made, to the last bit."""
        for into, values in (
            (self.parameters, state["parameters"]),
            (self.average.average if self.average else {}, state["average"]),
            (self._reference() if self.kl.refresh_every else {}, state["reference"]),
        ):
            for name, value in into.items():
                value.copy_(values[name])
        self.optimizer.load_state_dict(state["optimizer"])

    def _reference(self) -> dict[str, Tensor]:
        """The reference's own values of what is trained."""
        assert self.reference is not None
        own = dict(self.reference.transformer.named_parameters())
        return {name: own[name] for name in self.parameters}


def _values(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in parameters.items()}
