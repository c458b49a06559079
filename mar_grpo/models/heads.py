"""The per-token diffusion head of NOVA: an MLP with adaptive layer norm.

Leading axes are free and broadcast: x_t [S, N, C] against z [N, D] runs S trajectories of the same tokens and computes
the modulation (three fifths of the work) once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mar_grpo.models.blocks import Linear, PatchEmbed, ZeroLinear

TIME_DIM = 256


def time_frequencies(t: Tensor) -> Tensor:
    """cos, then sin of t * exp(-ln(1e4) i / 128): [...] on the 0..1000 scale -> [..., 256] float32.

    The frequencies are rounded from float64: float32 `exp` differs by one ulp from CPU to CPU and t magnifies it.
    """
    half = TIME_DIM // 2
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) * -math.log(10000.0) / half
    angle = t.float()[..., None] * exponent.double().exp().float()
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class Projection(nn.Module):
    """fc2(SiLU(fc1(x)))."""

    def __init__(self, in_features: int, width: int) -> None:
        super().__init__()
        self.fc1 = Linear(in_features, width)
        self.fc2 = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(x.to(self.fc1.weight.dtype))))


class TimeConditionEmbed(nn.Module):
    def __init__(self, cond_dim: int, width: int) -> None:
        super().__init__()
        self.timestep_proj = Projection(TIME_DIM, width)
        self.condition_proj = Projection(cond_dim, width)


class Modulation(nn.Module):
    """Projection of SiLU(s) to `parts` modulation vectors, in the published order scale, shift(, gate)."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.proj = ZeroLinear(width, parts * width)

    def forward(self, activated: Tensor) -> tuple[Tensor, ...]:
        return self.proj(activated).chunk(self.parts, dim=-1)


def modulate(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """LayerNorm without affine (eps 1e-6), times 1 + scale, plus shift."""
    return torch.addcmul(shift, F.layer_norm(h, h.shape[-1:], eps=1e-6), 1 + scale)


class HeadBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = Modulation(width, 3)
        self.proj = Projection(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-5)

    def forward(self, h: Tensor, activated: Tensor) -> Tensor:
        scale, shift, gate = self.norm1(activated)
        return torch.addcmul(h, self.norm2(self.proj(modulate(h, scale, shift))), gate)


class DiffusionHead(nn.Module):
    """x_t, t, z -> prediction, one row per token (published names under `image_decoder`)."""

    def __init__(self, depth: int, width: int, cond_dim: int, channels: int, patch: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(channels, patch, width)
        self.time_cond_embed = TimeConditionEmbed(cond_dim, width)
        self.blocks = nn.ModuleList(HeadBlock(width) for _ in range(depth))
        self.norm = Modulation(width, 2)
        self.head = ZeroLinear(width, patch * patch * channels)

    def condition(self, z: Tensor) -> Tensor:
        """z [..., D] -> [..., W]. The same for every diffusion step: compute it once per AR step."""
        return self.time_cond_embed.condition_proj(z)

    def time(self, t: Tensor) -> Tensor:
        """t [...] on the 0..1000 scale -> [..., W]. The same for every token: compute it once per diffusion step."""
        return self.time_cond_embed.timestep_proj(time_frequencies(t))

    def forward(self, x_t: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """x_t [..., C], time broadcastable to its leading axes and W, condition [..., W] -> [..., C].

        The result has the dtype of the weights; guidance and transitions go on in float32.
        """
        activated = F.silu(condition + time)
        h = self.patch_embed(x_t)
        for block in self.blocks:
            h = block(h, activated)
        return self.head(modulate(h, *self.norm(activated)))
