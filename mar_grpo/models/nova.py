"""NOVA: masked autoregressive trunk plus per-token diffusion head (text to image, one frame).

Source: NOVA (arXiv 2412.14169) and its published checkpoints; state-dict keys are the published ones. Tokens are laid
out (ph, pw, c) with the channel fastest, row-major over the grid. `known` masks: True = already committed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mar_grpo.errors import InputError
from mar_grpo.models.blocks import Linear, VisionTransformer, initialise, known_places, position_table
from mar_grpo.models.build import read_published
from mar_grpo.models.heads import TIME_DIM, DiffusionHead

PUBLISHED_HEADS = {768: 12, 1024: 16, 1536: 16}
STORED_TEXT_ROWS = 512


class NovaConfig(BaseModel):
    """`transformer/config.json`: the published keys, plus our optional `num_heads` and `patch_size`.

    Args:
        image_dim: channels c of a VAE latent.
        image_size: [height, width] of an image, px.
        image_stride: px per latent cell.
        image_base_size: [height, width] of the token grid.
        video_base_size: [1, height, width] of the frame-condition grid (Nv = height * width).
        arch: [video ViT, image ViT, head] as "vit_d<depth>w<width>", "mlp_d<depth>w<width>".
        num_heads: attention heads of the two ViTs (one number for both, or two); published widths need none.
        patch_size: latent cells per token side; the published rule is 15 // image_stride + 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image_dim: PositiveInt
    image_size: tuple[int, int]
    image_stride: PositiveInt
    text_token_dim: PositiveInt
    text_token_len: int
    image_base_size: tuple[int, int]
    video_base_size: tuple[int, int, int]
    video_mixer_rank: Literal[0] | None = None
    rotary_pos_embed: Literal[False] = False
    arch: tuple[str, str, str]
    num_heads: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    patch_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _check(self) -> NovaConfig:
        (_, video), (_, image), _ = self.vit("video"), self.vit("image"), self.head_size
        if video != image:
            raise ValueError(f"arch: the two ViTs must have one width, not {video} and {image}")
        for heads in self.heads:
            if image % heads:
                raise ValueError(f"num_heads: width {image} is not divisible by {heads} heads")
        if image % 4:
            raise ValueError(f"arch: width {image} is not divisible by 4 (2-D sin/cos positions)")
        if self.video_base_size[0] != 1:
            raise ValueError(f"video_base_size: {self.video_base_size[0]} frames; only single images are supported")
        grid = tuple(side // (self.image_stride * self.patch) for side in self.image_size)
        if grid != self.image_base_size:
            raise ValueError(f"image_base_size: {list(self.image_base_size)} does not fit the token grid {list(grid)}")
        if not 1 <= self.text_token_len <= STORED_TEXT_ROWS:
            raise ValueError(f"text_token_len: {self.text_token_len} is not within 1..{STORED_TEXT_ROWS}")
        return self

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, where: str = "transformer/config.json") -> NovaConfig:
        """Read a published config. Raises InputError naming the key that is missing, unknown or wrong."""
        family = config.get("_class_name", "NOVATransformer3DModel")
        if family != "NOVATransformer3DModel":
            raise InputError(f"_class_name is {family!r}, not 'NOVATransformer3DModel'", where=where)
        given = {key: value for key, value in config.items() if not key.startswith("_")}
        return read_published(cls, given, where=where)

    def to_dict(self) -> dict[str, Any]:
        """The published JSON form; optional keys appear only when they are set."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {"_class_name": "NOVATransformer3DModel", **values}

    def vit(self, which: Literal["video", "image"]) -> tuple[int, int]:
        """(depth, width) of one ViT."""
        return _arch(self.arch[0 if which == "video" else 1], "vit")

    @property
    def head_size(self) -> tuple[int, int]:
        """(depth, width) of the diffusion head."""
        return _arch(self.arch[2], "mlp")

    @property
    def heads(self) -> tuple[int, int]:
        """Attention heads of the video and the image ViT."""
        if isinstance(self.num_heads, int):
            return self.num_heads, self.num_heads
        if self.num_heads is not None:
            return self.num_heads
        width = self.vit("image")[1]
        if width not in PUBLISHED_HEADS:
            raise ValueError(f"num_heads is needed: width {width} is none of the published {sorted(PUBLISHED_HEADS)}")
        return PUBLISHED_HEADS[width], PUBLISHED_HEADS[width]

    @property
    def patch(self) -> int:
        return self.patch_size or 15 // self.image_stride + 1

    @property
    def num_tokens(self) -> int:
        return self.image_base_size[0] * self.image_base_size[1]

    @property
    def token_dim(self) -> int:
        return self.patch * self.patch * self.image_dim


def mask_schedule(num_tokens: int, ar_steps: int) -> list[int]:
    """Tokens committed by each AR step: differences of round(L cos(pi k / 2K)); empty steps are dropped."""
    left = [round(num_tokens * math.cos(0.5 * math.pi * k / ar_steps)) for k in range(ar_steps + 1)]
    return [now - after for now, after in pairwise(left) if now > after]


def _arch(name: str, kind: str) -> tuple[int, int]:
    found = re.fullmatch(rf"{kind}_d([1-9]\d*)w([1-9]\d*)", name)
    if not found:
        raise ValueError(f"arch: {name!r} is not of the form '{kind}_d<depth>w<width>'")
    return int(found[1]), int(found[2])


class MaskEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bos_token = nn.Parameter(torch.zeros(1, width))
        self.mask_token = nn.Parameter(torch.zeros(1, width))


class TextEmbed(nn.Module):
    """LN(Linear(text)); `weight` holds the rows that stand for missing text (stored, never trained)."""

    def __init__(self, text_dim: int, width: int) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.zeros(STORED_TEXT_ROWS, text_dim))
        self.proj = Linear(text_dim, width)
        self.norm = nn.LayerNorm(width, eps=1e-5)

    def forward(self, text: Tensor) -> Tensor:
        return self.norm(self.proj(text.to(self.proj.weight.dtype)))


class FrameEmbed(nn.Module):
    """norm(MLP(sin/cos of the frame number)); the only frame here is number 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time_proj = nn.Sequential(Linear(TIME_DIM, width), nn.SiLU(), Linear(width, width))
        self.norm = nn.LayerNorm(width, eps=1e-5)

    def forward(self) -> Tensor:
        """[1, D]: sin 0 = 0 comes first, then cos 0 = 1."""
        weight = self.norm.weight
        zero = torch.zeros(1, TIME_DIM // 2, dtype=weight.dtype, device=weight.device)
        return self.norm(self.time_proj(torch.cat([zero, zero + 1], dim=1)))


class NovaTransformer(nn.Module):
    """The transformer of a NOVA checkpoint. Starts as zeros: load a state dict or call `initialise_parameters`."""

    def __init__(self, config: NovaConfig) -> None:
        super().__init__()
        self.config = config
        (video_depth, width), (image_depth, _) = config.vit("video"), config.vit("image")
        video_heads, image_heads = config.heads
        channels, patch = config.image_dim, config.patch
        self.video_encoder = VisionTransformer(video_depth, width, video_heads, channels, 2 * patch)
        self.image_encoder = VisionTransformer(image_depth, width, image_heads, channels, patch)
        self.image_decoder = DiffusionHead(*config.head_size, width, channels, patch)
        self.mask_embed = MaskEmbed(width)
        self.text_embed = TextEmbed(config.text_token_dim, width)
        self.video_pos_embed = FrameEmbed(width)
        self.image_pos: Tensor
        self.video_pos: Tensor
        self.register_buffer("image_pos", position_table(*config.image_base_size, width), persistent=False)
        self.register_buffer("video_pos", position_table(*config.video_base_size[1:], width), persistent=False)

    def initialise_parameters(self, generator: torch.Generator, *, residual_norm_gain: float = 1.0) -> None:
        """See `blocks.initialise`; a gain of 0.5 suits trunks of a few million parameters."""
        initialise(self, generator, residual_norm_gain=residual_norm_gain)

    @property
    def num_tokens(self) -> int:
        return self.config.num_tokens

    @property
    def token_dim(self) -> int:
        return self.config.token_dim

    @property
    def pixels_per_token(self) -> int:
        return self.config.patch**2

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width), px."""
        return self.config.image_size

    @property
    def width(self) -> int:
        return self.mask_embed.mask_token.shape[1]

    def patchify(self, latents: Tensor) -> Tensor:
        """[B, c, H, W] -> tokens [B, L, p*p*c], last axis (ph, pw, c)."""
        batch, channels, height, width = latents.shape
        patch = self.config.patch
        cut = latents.reshape(batch, channels, height // patch, patch, width // patch, patch)
        return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """tokens [B, L, p*p*c] -> [B, c, H, W]."""
        (rows, columns), patch, channels = self.config.image_base_size, self.config.patch, self.config.image_dim
        cut = tokens.reshape(-1, rows, columns, patch, patch, channels)
        return cut.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, rows * patch, columns * patch)

    def pad_text(self, features: Sequence[Tensor]) -> Tensor:
        """List of [n_i, text_dim] -> [B, text_token_len, text_dim]; rows past n_i are the stored ones.

        An empty prompt ([0, text_dim]) gives the unconditional input. Raises InputError when a prompt is too long.
        """
        length = self.config.text_token_len
        counts = [len(feature) for feature in features]
        if max(counts) > length:
            raise InputError(
                f"a prompt has {max(counts)} text tokens, the model takes {length}",
                where=f"prompt {counts.index(max(counts))} of the batch",
            )
        rows = self.text_embed.weight[:length]
        padded = pad_sequence([*features, rows], batch_first=True)[:-1].to(rows.dtype)
        given = torch.arange(length, device=rows.device) < torch.tensor(counts, device=rows.device)[:, None]
        return torch.where(given[..., None], padded, rows)

    def condition(self, text: Tensor) -> Tensor:
        """Padded text [B, Lt, text_dim] -> frame condition [B, Nv, D]: the video encoder over text and BOS tokens.

        Depends on the prompt only (never on tokens): compute it once per prompt and share it between the images of a
        group and all AR steps.
        """
        text_tokens = self.text_embed(text)
        bos = self.mask_embed.bos_token + self.video_pos + self.video_pos_embed()
        bos = bos.expand(text.shape[0], -1, -1)
        x = torch.cat([text_tokens, bos], dim=1)
        *blocks, last = self.video_encoder.blocks
        for block in blocks:
            x = block(x)
        return self.video_encoder.norm(last(x, x[:, text.shape[1] :]))

    def ar_latents(
        self,
        tokens: Tensor,
        known: Tensor,
        cond: Tensor,
        *,
        num_known: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Conditioning z of the head.

        The first half of the image encoder sees the condition and the known tokens only; values of `tokens` at unknown
        places are never read.

        Args:
            tokens: [B, L, C] committed tokens.
            known: bool [B, L], as many True in each row.
            cond: [B, Nv, D] from `condition`.
            num_known: that number, when the caller knows it; saves a device synchronisation and the check.
            wanted: int64 [B, M] token indices; only their z is computed in the last block.

        Returns:
            z [B, L, D], or [B, M, D] with `wanted`.

        Raises:
            InputError: rows have different numbers of known tokens.
        """
        frame_tokens = cond.shape[1]
        places = known_places(known, num_known)[..., None]
        num_known = places.shape[1]
        cond = cond.to(self.image_pos.dtype)
        given = self.image_encoder.patch_embed(tokens.gather(1, places.expand(-1, -1, tokens.shape[2])))
        x = torch.cat([cond, given + self.image_pos[places[..., 0]]], dim=1)
        blocks = list(self.image_encoder.blocks)
        half = len(blocks) // 2
        for block in blocks[:half]:
            x = block(x)
        cond, given = x.split([frame_tokens, num_known], dim=1)
        full = (self.mask_embed.mask_token + self.image_pos).expand(tokens.shape[0], -1, -1)
        full = full.scatter(1, places.expand(-1, -1, full.shape[2]), given.to(full.dtype))
        x = torch.cat([cond, full], dim=1)
        for block in blocks[half:-1]:
            x = block(x)
        query = x[:, frame_tokens:]
        if wanted is not None:
            query = query.gather(1, wanted[..., None].expand(-1, -1, x.shape[2]))
        return self.image_encoder.norm(blocks[-1](x, query))

    def head_condition(self, z: Tensor) -> Tensor:
        """z [..., D] -> [..., W], the part of the head that does not depend on the diffusion step."""
        return self.image_decoder.condition(z)

    def head_time(self, t: Tensor) -> Tensor:
        """t [...] (0..1000 scale) -> [..., W], the part of the head that depends on the diffusion step only."""
        return self.image_decoder.time(t)

    def head_conditioned(self, x_t: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """`head` with `head_time(t)` and `head_condition(z)` computed beforehand."""
        return self.image_decoder(x_t, time, condition)

    def head(self, x_t: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Prediction [..., C] for noisy tokens x_t [..., C] under z [..., D].

        Rows are tokens, any subset. `t` (0..1000 scale) is 0-dim or broadcastable to the leading axes; leading axes of
        x_t and z broadcast, e.g. x_t [S, N, C] with z [N, D] for S trajectories.
        """
        return self.image_decoder(x_t, self.image_decoder.time(t), self.image_decoder.condition(z))

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.image_decoder.parameters())

    def trunk_parameters(self) -> list[nn.Parameter]:
        """All other parameters that reach the output. `video_encoder.patch_embed` does not: there is no past frame."""
        outside = ("image_decoder.", "video_encoder.patch_embed.")
        return [value for name, value in self.named_parameters() if not name.startswith(outside)]
