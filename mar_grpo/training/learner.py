"""What an update changes: the policy, its optimiser, the average of its head, the reference that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mar_grpo.models.policy import Policy
from mar_grpo.training.distributed import digest, local
from mar_grpo.training.lora import add_adapters, merge_adapters, without_adapters
from mar_grpo.training.optimization import Ema, make_optimizer, set_rate
from mar_grpo.training.parts import trained_parameters
from mar_grpo.training.precision import Masters
from mar_grpo.training.sharding import checkpoint_blocks, clip_gradients, gathered, make_whole, shard, trunk_blocks

if TYPE_CHECKING:
    from mar_grpo.config import Recipe


class Learner:
    """Prepares a start policy for a recipe, in place.

    Args:
        mesh: processes that the trunk's blocks are shared out over; None: each has the whole policy.

    Attributes:
        parameters: what is trained, by name within the transformer: of the part, or the adapters beside it. Where the
            transformer is bfloat16 its float32 values, where it is sharded DTensors.
        reference: what the KL is against; None where it is off.

    Raises:
        InputError: the policy lacks the part, or a layer that is to have an adapter.
    """

    def __init__(self, recipe: Recipe, policy: Policy, device: torch.device, mesh: DeviceMesh | None = None) -> None:
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
        names = [name for name, value in self.parameters.items() if id(value) in reached]
        self._place(recipe, mesh)
        head = {name: self.parameters[name] for name in names}
        self.optimizer = make_optimizer(self.trained, self.config, list(head.values()))
        self.average = Ema(head, self.config.head_ema_decay) if self.config.head_ema_decay else None

    def _place(self, recipe: Recipe, mesh: DeviceMesh | None) -> None:
        """Activation checkpointing, precision and sharding, in the order in which they fit into each other."""
        low, networks = recipe.training.precision == "bfloat16", self._networks()
        self.sharded, self.masters = mesh is not None, list[Masters]()
        if recipe.training.activation_checkpointing:
            checkpoint_blocks(networks[0])
        if low:
            for network, trained in zip(networks, (self.parameters, {}), strict=False):
                apart = [value for block in trunk_blocks(network) for value in block.parameters()] if mesh else []
                self.masters.append(Masters(network, trained, apart))
        if mesh:
            for network in networks:
                shard(network, mesh, low=low)
        own = dict(networks[0].named_parameters())
        exact = self.masters[0].values if low else {}
        self.parameters = {name: exact.get(name, own[name]) for name in self.parameters}

    def _networks(self) -> list[nn.Module]:
        """Of the policy, and of the reference."""
        return [self.policy.transformer] + ([self.reference.transformer] if self.reference else [])

    def _push(self) -> None:
        """After a change of `parameters`: what the arithmetic reads follows."""
        if self.masters:
            self.masters[0].push()

    @property
    def trained(self) -> list[nn.Parameter]:
        """What is trained, in one order on all ranks."""
        return list(self.parameters.values())

    def clip(self) -> float:
        """Cut the gradient to `max_grad_norm`; returns its norm before."""
        return clip_gradients(self.trained, self.config.max_grad_norm)

    def step(self) -> None:
        """Of the optimiser."""
        self.optimizer.step()
        self._push()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, the policy may be called without gradient and without other processes."""
        with gathered(self.policy.transformer):
            yield

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same on all ranks: sha256 of trained parameters (sharded ones aside) and of optimiser steps,
        and whether all are finite."""
        whole = [value for value in self.trained if not isinstance(value, DTensor)]
        steps = [each["step"] for each in self.optimizer.state.values() if "step" in each]
        return {
            "finite": all(bool(local(value).isfinite().all()) for value in self.trained),
            "parameters": digest(whole),
            "optimiser step": digest(steps),
        }

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
        """The policy as others see it: with the average of its head, where there is one. Calls talk to no process."""
        self._swap()
        try:
            with self.gathered():
                yield self.policy
        finally:
            self._swap()

    def _swap(self) -> None:
        if self.average:
            self.average.swap()
            self._push()

    def finished(self) -> Policy:
        """The policy to publish, whole and in float32; nothing can be trained after this. All processes must ask."""
        self._swap()
        self.reference = None  # it may share the weights that are written now
        for masters in self.masters[:1]:
            masters.restore()
        make_whole(self.policy.transformer)
        if any(".lora_" in name for name in self.parameters):
            merge_adapters(self.policy)
        return self.policy

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs. What is sharded is a DTensor in it, of which each process has its part."""
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
        self._push()

    def _reference(self) -> dict[str, Tensor]:
        """The reference's own values of what is trained."""
        assert self.reference is not None
        own = dict(self.reference.transformer.named_parameters())
        return {name: own[name] for name in self.parameters}


def _values(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in parameters.items()}
