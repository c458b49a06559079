"""The per-token diffusion head of MAR: an MLP with adaptive layer norm that also predicts its variance.

Leading axes are free and broadcast, as in `heads.py`: x_t [S, N, C] against z [N, D] runs S trajectories.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mar_grpo.models.blocks import Linear, ZeroLinear
from mar_grpo.models.heads import TIME_DIM, time_frequencies


def two_layers(in_features: int, width: int) -> nn.Sequential:
    """Linear, SiLU, Linear; published names 0 and 2."""
    return nn.Sequential(Linear(in_features, width), nn.SiLU(), Linear(width, width))


def modulation(width: int, parts: int) -> nn.Sequential:
    """SiLU, then a projection to `parts` vectors in the published order shift, scale(, gate); published name 1."""
    return nn.Sequential(nn.SiLU(), ZeroLinear(width, parts * width))


def modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, h, 1 + scale)


class TimeEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = two_layers(TIME_DIM, width)

    def forward(self, t: Tensor) -> Tensor:
        """t [...] on the 0..1000 scale -> [..., W]; the sinusoid is float32 whatever the weights are."""
        return self.mlp(time_frequencies(t).to(self.mlp.get_parameter("0.weight").dtype))


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = two_layers(width, width)
        self.adaLN_modulation = modulation(width, 3)

    def forward(self, h: Tensor, activated: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation[1](activated).chunk(3, dim=-1)
        return torch.addcmul(h, gate, self.mlp(modulate(self.in_ln(h), shift, scale)))


class FinalLayer(nn.Module):
    def __init__(self, width: int, out_features: int) -> None:
        super().__init__()
        self.linear = ZeroLinear(width, out_features)
        self.adaLN_modulation = modulation(width, 2)

    def forward(self, h: Tensor, activated: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation[1](activated).chunk(2, dim=-1)
        return self.linear(modulate(F.layer_norm(h, h.shape[-1:], eps=1e-6), shift, scale))


class MarHead(nn.Module):
    """x_t, t, z -> [eps | v], one row per token."""

    def __init__(self, depth: int, width: int, cond_dim: int, token_dim: int) -> None:
        super().__init__()
        self.time_embed = TimeEmbed(width)
        self.cond_embed = Linear(cond_dim, width)
        self.input_proj = Linear(token_dim, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, 2 * token_dim)

    def condition(self, z: Tensor) -> Tensor:
        """z [..., D] -> [..., W]. The same for every diffusion step: compute it once per AR step."""
        return self.cond_embed(z.to(self.cond_embed.weight.dtype))

    def time(self, t: Tensor) -> Tensor:
        """t [...] (0..999) -> [..., W]. The same for every token: compute it once per diffusion step."""
        return self.time_embed(t)

    def forward(self, x_t: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """x_t [..., C], time broadcastable to its leading axes and W, condition [..., W] -> [..., 2 C].

        The result has the dtype of the weights; guidance and transitions go on in float32.
        """
        activated = F.silu(condition + time)  # the SiLU of every adaLN_modulation, once
        h = self.input_proj(x_t.to(self.input_proj.weight.dtype))
        for block in self.res_blocks:
            h = block(h, activated)
        return self.final_layer(h, activated)


class DiffLoss(nn.Module):
    """Holds the network under its published name `diffloss.net`; the loss itself is `respaced.training_loss`."""

    def __init__(self, depth: int, width: int, cond_dim: int, token_dim: int) -> None:
        super().__init__()
        self.net = MarHead(depth, width, cond_dim, token_dim)
