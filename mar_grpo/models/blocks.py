"""Transformer blocks of the trunks and the way any of our modules gets its first values.

Modules here never draw from the global generator: `Linear` and `Conv2d` start as zeros and are filled either from a
checkpoint or by `initialise`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mar_grpo.errors import InputError


class Linear(nn.Linear):
    """`nn.Linear` that starts as zeros instead of drawing from the global generator."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ZeroLinear(Linear):
    """A linear map that training starts at zero too (AdaLN projections, output layer of a diffusion head)."""


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` that starts as zeros instead of drawing from the global generator."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class PatchEmbed(nn.Module):
    """Patch embedding, applied to tokens that are cut already.

    The weight keeps the published convolution shape (D, C, p, p); tokens are laid out (ph, pw, c), channel fastest.
    """

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = Conv2d(channels, width, patch, stride=patch)

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., p*p*C] -> [..., D]."""
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)
        return F.linear(tokens.to(weight.dtype), weight, self.proj.bias)


class Attention(nn.Module):
    """Full multi-head attention; rows of `qkv` are q, k, v, then head, then dimension."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def _heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        batch, length, _ = x.shape
        return x.view(batch, length, parts, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor, query: Tensor | None = None) -> Tensor:
        """x [B, N, D] attends to itself; with `query` [B, M, D] only those rows are computed."""
        if query is None:
            q, k, v = self._heads(self.qkv(x), 3)
        else:
            width = x.shape[-1]
            (q,) = self._heads(F.linear(query, self.qkv.weight[:width], self.qkv.bias[:width]), 1)
            k, v = self._heads(F.linear(x, self.qkv.weight[width:], self.qkv.bias[width:]), 2)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """fc2(GELU(fc1(x))), exact (erf) GELU."""

    def __init__(self, width: int, ratio: float = 4.0) -> None:
        super().__init__()
        self.fc1 = Linear(width, int(ratio * width))
        self.fc2 = Linear(int(ratio * width), width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Residual post-norm block: x + norm1(attn(x)), then x + norm2(mlp(x)); there is no pre-norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attn = Attention(width, num_heads)
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.mlp = Mlp(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-5)

    def forward(self, x: Tensor, query: Tensor | None = None) -> Tensor:
        """x [B, N, D] -> [B, N, D]; with `query` [B, M, D] (rows of x) only those rows -> [B, M, D]."""
        out = (x if query is None else query) + self.norm1(self.attn(x, query))
        return out + self.norm2(self.mlp(out))


class PreNormBlock(nn.Module):
    """Residual pre-norm block (ViT): x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: float = 4.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, mlp_ratio)

    def forward(self, x: Tensor, query: Tensor | None = None) -> Tensor:
        """x [B, N, D] -> [B, N, D]; with `query` [B, M, D] (rows of x) only those rows -> [B, M, D]."""
        out = x + self.attn(self.norm1(x)) if query is None else query + self.attn(self.norm1(x), self.norm1(query))
        return out + self.mlp(self.norm2(out))


class VisionTransformer(nn.Module):
    """The parts of one NOVA encoder (published key names); `nova.py` decides which tokens pass through which block."""

    def __init__(self, depth: int, width: int, num_heads: int, channels: int, patch: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(channels, patch, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-5)


def known_places(known: Tensor, num_known: int | None = None) -> Tensor:
    """Indices of the True of each row of `known` [B, L] in raster order, int64 [B, num_known].

    Args:
        num_known: True in each row, when the caller knows it; saves a device synchronisation and the check.

    Raises:
        InputError: rows have different numbers of them.
    """
    if num_known is None:
        counts = known.sum(dim=1).tolist()
        num_known = int(counts[0])
        if any(count != num_known for count in counts):
            raise InputError("all rows of a call need the same number of known tokens", where=f"counts {counts}")
    return known.byte().argsort(dim=1, descending=True, stable=True)[:, :num_known]


def position_table(height: int, width: int, dim: int) -> Tensor:
    """Fixed 2-D sin/cos positions [height*width, dim], row-major, channels [sin w, cos w, sin h, cos h].

    No checkpoint holds them, so they are made on the CPU even where a model is built on the meta device.
    """
    frequency, rows, columns = (torch.arange(n, dtype=torch.float64, device="cpu") for n in (dim // 4, height, width))
    frequency = 10000.0 ** -(frequency / (dim // 4))
    rows = rows.repeat_interleave(width)[:, None] * frequency
    columns = columns.repeat(height)[:, None] * frequency
    return torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1).float()


@torch.no_grad()
def initialise(
    module: nn.Module, generator: torch.Generator, *, residual_norm_gain: float = 1.0, token_std: float = 0.02
) -> None:
    """Give every parameter of a NOVA-type module its first value, drawn from `generator` only.

    Linear and convolution weights are Xavier-uniform (patch embeddings seen as linear maps), biases 0; norms 1 and 0;
    the residual norms of trunk blocks start at `residual_norm_gain` (below 1 keeps a small post-norm trunk stable);
    the AdaLN projections and the output layer of a diffusion head start at 0 (its output is then 0); loose parameters
    and float buffers that are stored (mask and BOS tokens, empty-text rows) are normal with `token_std`.
    """
    stored = module.state_dict(keep_vars=True)
    for name, child in module.named_modules():
        for key, value in (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)):
            if isinstance(child, nn.LayerNorm):
                value.fill_(1.0 if key == "weight" else 0.0)
            elif isinstance(child, ZeroLinear) or (key == "bias" and isinstance(child, (nn.Linear, nn.Conv2d))):
                value.zero_()
            elif isinstance(child, (nn.Linear, nn.Conv2d)):
                bound = math.sqrt(6.0 / (value[0].numel() + value.shape[0]))
                value.uniform_(-bound, bound, generator=generator)
            elif f"{name}.{key}".lstrip(".") in stored:
                value.normal_(0.0, token_std, generator=generator)
    for child in module.modules():
        if isinstance(child, Block):
            child.norm1.weight.fill_(residual_norm_gain)
            child.norm2.weight.fill_(residual_norm_gain)
