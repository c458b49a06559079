"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) in float32.

torch's own runs the Newton-Schulz steps in bfloat16, which a CPU without bfloat16 units emulates: four times slower for
the shapes of the small model. Same formula and defaults as torch.optim.Muon otherwise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the quintic of the reference implementation
STEPS = 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices [N, A, B] with their singular values brought near 1 (0.7 to 1.2), in float32."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal: every matrix moves by `lr` times sqrt(max(1, rows / columns)) in spectral norm.

    Args:
        parameters: matrices only.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's overloads for closures
        """Update every matrix that has a gradient; those of one shape together."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                directions = []
                for parameter in parameters:
                    state, gradient = self.state[parameter], parameter.grad
                    assert gradient is not None
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                    directions.append(gradient.lerp(state["momentum_buffer"], group["momentum"]))
                rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(orthogonalised(torch.stack(directions))), alpha=-rate)
