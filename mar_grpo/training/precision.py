"""bfloat16 weights for the arithmetic, float32 values beside them for gradient, optimiser and checkpoint.

Diffusion, guidance, densities and the autoencoder are float32 in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn


class Masters:
    """Casts a network to bfloat16, in place, and keeps what that would lose.

    A gradient goes to the float32 value as soon as a backward pass has it, and is added up there.

    Args:
        trained: parameters of the network that the optimiser moves, by name.
        apart: parameters that stay as they are: sharded blocks, which FSDP casts when it gathers them.

    Attributes:
        values: float32 values of `trained` less `apart`, to be given to the optimiser.
    """

    def __init__(self, network: nn.Module, trained: Mapping[str, Tensor], apart: Collection[Tensor] = ()) -> None:
        self.network = network
        self.values: dict[str, nn.Parameter] = {}
        self._exact: dict[str, Tensor] = {}  # of what is stored but not trained
        left, stored = {id(value) for value in apart}, network.state_dict().keys()
        for name, value in (*network.named_parameters(), *network.named_buffers()):
            if id(value) in left or value.dtype != torch.float32:
                continue
            if name in trained:
                self.values[name] = nn.Parameter(value.detach().clone())
                value.register_post_accumulate_grad_hook(_to(self.values[name]))
            elif name in stored:
                self._exact[name] = value.detach().cpu()
            value.data = value.data.bfloat16()
        self._low: list[Tensor] = [network.get_parameter(name) for name in self.values]

    @torch.no_grad()
    def push(self) -> None:
        """Round the float32 values into the network; to be called when they have changed."""
        if self._low:
            torch._foreach_copy_(self._low, list(self.values.values()))

    @torch.no_grad()
    def restore(self) -> None:
        """The network in float32 again, with exact values, to be written; nothing can be trained after."""
        exact = self._exact | self.values
        for name, value in (*self.network.named_parameters(), *self.network.named_buffers()):
            if name in exact:
                value.data = exact[name].data.to(value.device)


def _to(master: nn.Parameter):  # type: ignore[no-untyped-def]
    def move(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    return move
