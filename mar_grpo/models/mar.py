"""MAR: masked autoregressive encoder and decoder plus per-token diffusion head (class to image; Harmon's image part).

Source: MAR (arXiv 2406.11838) and its published checkpoints; state-dict keys are the published ones. Tokens are laid
out (c, ph, pw) with the pixel of the patch fastest, row-major over the grid. `known` masks: True = already committed.

K buffer slots stand before the visible tokens; what they hold is the condition (a class embedding, or `fake_latent`
for none). Dropout of the published code belongs to its training and is never applied here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor, nn

from mar_grpo.diffusion.respaced import RespacedSchedule
from mar_grpo.errors import InputError
from mar_grpo.models.blocks import Linear, PreNormBlock, initialise, known_places
from mar_grpo.models.build import read_published
from mar_grpo.models.kl16 import Kl16
from mar_grpo.models.mar_head import DiffLoss
from mar_grpo.models.policy import Conditioning, Policy

SIZES = {  # published types: width, depth of the encoder and of the decoder, attention heads
    "mar_base": (768, 12, 12),
    "mar_large": (1024, 16, 16),
    "mar_huge": (1280, 20, 16),
}
HEADS = {"mar_base": (6, 1024), "mar_large": (8, 1280), "mar_huge": (12, 1536)}  # diffusion head: depth, width


class MarConfig(BaseModel):
    """A MAR model in the published keys.

    Args:
        type: a published size, instead of the six sizes of encoder and decoder (its head, where not given, too).
        img_size: px; one number, or (height, width).
        vae_stride: px per latent cell; patch_size: cells per token side.
        vae_embed_dim: channels c of a VAE latent.
        buffer_size: K.
        diffloss_d, diffloss_w: depth and width of the diffusion head.
        num_sampling_steps: published number of diffusion steps, or a respacing.
        mask_ratio_min, label_drop_prob, attn_dropout, proj_dropout, diffusion_batch_mul, grad_checkpointing: of the
            published training; without effect here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: Literal["mar_base", "mar_large", "mar_huge"] | None = None
    img_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 256
    vae_stride: PositiveInt = 16
    patch_size: PositiveInt = 1
    vae_embed_dim: PositiveInt = 16
    encoder_embed_dim: PositiveInt
    encoder_depth: PositiveInt
    encoder_num_heads: PositiveInt
    decoder_embed_dim: PositiveInt
    decoder_depth: PositiveInt
    decoder_num_heads: PositiveInt
    mlp_ratio: float = Field(4.0, gt=0)
    norm_eps: float = Field(1e-6, gt=0)
    class_num: PositiveInt = 1000
    buffer_size: PositiveInt = 64
    diffloss_d: PositiveInt
    diffloss_w: PositiveInt
    num_sampling_steps: int | str = "100"
    mask_ratio_min: float = 0.7
    label_drop_prob: float = 0.1
    attn_dropout: float = 0.1
    proj_dropout: float = 0.1
    diffusion_batch_mul: int = 4
    grad_checkpointing: bool = False

    @model_validator(mode="before")
    @classmethod
    def _published_size(cls, values: Any) -> Any:
        size = values.get("type") if isinstance(values, dict) else None
        if size not in SIZES:
            return values
        width, depth, heads = SIZES[size]
        sizes = {
            f"{part}_{key}": value
            for part in ("encoder", "decoder")
            for key, value in (("embed_dim", width), ("depth", depth), ("num_heads", heads))
        }
        for key, value in sizes.items():
            if values.get(key, value) != value:
                raise ValueError(f"{key}: {values[key]} is not that of {size}, {value}")
        head_depth, head_width = HEADS[size]
        return {"diffloss_d": head_depth, "diffloss_w": head_width, **values, **sizes}

    @model_validator(mode="after")
    def _check(self) -> MarConfig:
        for part, width, heads in (
            ("encoder", self.encoder_embed_dim, self.encoder_num_heads),
            ("decoder", self.decoder_embed_dim, self.decoder_num_heads),
        ):
            if width % heads:
                raise ValueError(f"{part}_num_heads: width {width} is not divisible by {heads} heads")
        for side in self.image_size:
            if side % self.token_pixels:
                raise ValueError(f"img_size: {side} px is no multiple of {self.token_pixels} px a token")
        return self

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, where: str = "config.json: mar") -> MarConfig:
        """Read a published config. Raises InputError naming the key that is missing, unknown or wrong."""
        return read_published(cls, config, where=where)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; optional keys appear only when they are set."""
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width), px."""
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size

    @property
    def token_pixels(self) -> int:
        """Pixels per token side."""
        return self.vae_stride * self.patch_size

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of tokens."""
        height, width = self.image_size
        return height // self.token_pixels, width // self.token_pixels

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def token_dim(self) -> int:
        return self.vae_embed_dim * self.patch_size**2


def mask_schedule(num_tokens: int, ar_steps: int) -> list[int]:
    """Tokens committed by each AR step; empty steps are dropped.

    After step s, m_s = max(1, min(m_(s-1) - 1, floor(L cos(pi s / 2K)))) are still masked; the last step commits them.
    """
    left = [num_tokens]
    for step in range(1, ar_steps):
        left.append(max(1, min(left[-1] - 1, math.floor(num_tokens * math.cos(math.pi / 2 * step / ar_steps)))))
    return [now - after for now, after in pairwise([*left, 0]) if now > after]


class Mar(nn.Module):
    """The network of a MAR checkpoint. Starts as zeros: load a state dict or call `initialise_parameters`.

    Args:
        config: sizes; its grid is the one that the position tables were trained on.
        grid: (rows, columns) that images are made on, default that of `config`. The tables of other grids are
            resized bilinearly at each call (a millisecond), so that gradient reaches the stored ones.
    """

    def __init__(self, config: MarConfig, grid: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.config, self.grid = config, grid or config.grid
        width, out_width, stored = config.encoder_embed_dim, config.decoder_embed_dim, config.num_tokens
        self.class_emb = nn.Embedding.from_pretrained(torch.zeros(config.class_num, width), freeze=False)
        self.fake_latent = nn.Parameter(torch.zeros(1, width))
        self.z_proj = Linear(config.token_dim, width)
        self.z_proj_ln = nn.LayerNorm(width, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, config.buffer_size + stored, width))
        self.encoder_blocks = self._blocks(config.encoder_depth, width, config.encoder_num_heads)
        self.encoder_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.decoder_embed = Linear(width, out_width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, out_width))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, config.buffer_size + stored, out_width))
        self.decoder_blocks = self._blocks(config.decoder_depth, out_width, config.decoder_num_heads)
        self.decoder_norm = nn.LayerNorm(out_width, eps=config.norm_eps)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, stored, out_width))
        self.diffloss = DiffLoss(config.diffloss_d, config.diffloss_w, out_width, config.token_dim)

    def _blocks(self, depth: int, width: int, heads: int) -> nn.ModuleList:
        ratio, eps = self.config.mlp_ratio, self.config.norm_eps
        return nn.ModuleList(PreNormBlock(width, heads, ratio, eps) for _ in range(depth))

    def initialise_parameters(self, generator: torch.Generator) -> None:
        """See `blocks.initialise`."""
        initialise(self, generator)

    @property
    def num_tokens(self) -> int:
        """L, of the grid that images are made on."""
        return self.grid[0] * self.grid[1]

    @property
    def token_dim(self) -> int:
        return self.config.token_dim

    @property
    def pixels_per_token(self) -> int:
        return 1

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the images that are made, px."""
        return self.grid[0] * self.config.token_pixels, self.grid[1] * self.config.token_pixels

    def patchify(self, latents: Tensor) -> Tensor:
        """[B, c, H, W] -> tokens [B, L, c*p*p], last axis (c, ph, pw)."""
        batch, channels, height, width = latents.shape
        patch = self.config.patch_size
        cut = latents.reshape(batch, channels, height // patch, patch, width // patch, patch)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """tokens [B, L, c*p*p] -> [B, c, H, W]."""
        (rows, columns), patch, channels = self.grid, self.config.patch_size, self.config.vae_embed_dim
        cut = tokens.reshape(-1, rows, columns, channels, patch, patch)
        return cut.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * patch, columns * patch)

    def encode(self, tokens: Tensor, places: Tensor, buffer: Tensor) -> Tensor:
        """The visible half of the forward: buffer slots, then the tokens at `places`; gradient flows.

        Args:
            tokens: [B, L, C]; only those at `places` are read.
            places: int64 [B, n], raster order (`blocks.known_places`).
            buffer: what the K slots hold, [B, K, De] or [B, 1, De] for the same in all (B may be 1).

        Returns:
            [B, K + n, De].
        """
        slots = self.config.buffer_size
        positions = self._positions(self.encoder_pos_embed_learned)
        given = tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[2]))
        given = self.z_proj(given.to(self.z_proj.weight.dtype)) + positions[slots:][places]
        buffer = buffer.to(given.dtype).expand(len(tokens), slots, -1) + positions[:slots]
        x = self.z_proj_ln(torch.cat([buffer, given], dim=1))
        for block in self.encoder_blocks:
            x = block(x)
        return self.encoder_norm(x)

    def decode(self, x: Tensor, places: Tensor, wanted: Tensor | None = None) -> Tensor:
        """The full half of the forward: encoded tokens among mask tokens; gradient flows.

        Args:
            x: [B, K + n, De] from `encode`.
            places: int64 [B, n], those `x` was made with.
            wanted: int64 [B, M] token indices; only their z is computed in the last block.

        Returns:
            z [B, L, Dd], or [B, M, Dd] with `wanted`.
        """
        slots = self.config.buffer_size
        x = self.decoder_embed(x)
        full = self.mask_token.to(x.dtype).expand(len(x), self.num_tokens, -1)
        full = full.scatter(1, places[..., None].expand(-1, -1, x.shape[2]), x[:, slots:])
        x = torch.cat([x[:, :slots], full], dim=1) + self._positions(self.decoder_pos_embed_learned)
        *blocks, last = self.decoder_blocks
        for block in blocks:
            x = block(x)
        query, positions = x[:, slots:], self._positions(self.diffusion_pos_embed_learned)
        if wanted is None:
            return self.decoder_norm(last(x, query)) + positions
        query = query.gather(1, wanted[..., None].expand(-1, -1, x.shape[2]))
        return self.decoder_norm(last(x, query)) + positions[wanted]

    def ar_latents(
        self,
        tokens: Tensor,
        known: Tensor,
        cond: Tensor,
        *,
        num_known: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Conditioning z of the head: `encode`, then `decode`; arguments as `Policy.ar_latents`, cond [B, 1, De]."""
        places = known_places(known, num_known)
        return self.decode(self.encode(tokens, places, cond), places, wanted)

    def _positions(self, table: Tensor) -> Tensor:
        """A stored table [1, (K +) L, D] for the grid that images are made on: [(K +) L', D]."""
        if self.grid == self.config.grid:
            return table[0]
        slots = table.shape[1] - self.config.num_tokens
        image = table[0, slots:].float().unflatten(0, self.config.grid).movedim(-1, 0)[None]
        image = F.interpolate(image, size=self.grid, mode="bilinear", align_corners=False)
        return torch.cat([table[0, :slots], image[0].flatten(1).T.to(table.dtype)])

    def head_condition(self, z: Tensor) -> Tensor:
        """z [..., Dd] -> [..., W], the part of the head that does not depend on the diffusion step."""
        return self.diffloss.net.condition(z)

    def head_time(self, t: Tensor) -> Tensor:
        """Original timestep t [...] (0..999) -> [..., W], the part of the head that depends on it only."""
        return self.diffloss.net.time(t)

    def head_conditioned(self, x_t: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Prediction [..., 2 C] = [eps | v] of noisy tokens x_t [..., C]."""
        return self.diffloss.net(x_t, time, condition)

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.diffloss.parameters())

    def trunk_parameters(self) -> list[nn.Parameter]:
        """All other parameters (Harmon never uses `class_emb`)."""
        return [value for name, value in self.named_parameters() if not name.startswith("diffloss.")]


class MarFamilyPolicy(Policy):
    """What MAR and Harmon have in common: the autoencoder, the diffusion, the order of commitment."""

    vae: Kl16

    def _join(self, transformer: nn.Module, config: MarConfig, vae: Kl16) -> None:
        """Take the two parts; InputError if they do not fit together."""
        channels = vae.model.config["latent_channels"]
        for what, ours, theirs in (
            ("vae_embed_dim against the autoencoder's channels", config.vae_embed_dim, channels),
            ("vae_stride against pixels per latent", config.vae_stride, vae.stride),
        ):
            if ours != theirs:
                raise InputError(f"parts do not fit: {what}, {ours} != {theirs}", where="config.json: mar")
        self.transformer, self.vae = transformer, vae.requires_grad_(False)

    def schedule(
        self, num_steps: int | str, *, eta: float = 0.7, last_step_deterministic: bool = True
    ) -> RespacedSchedule:
        """The cosine DDPM with a learned variance; `num_steps` may be a respacing. The flow's options mean nothing."""
        return RespacedSchedule(num_steps).to(self.device)

    def mask_schedule(self, ar_steps: int) -> list[int]:
        return mask_schedule(self.num_tokens, ar_steps)


class MarPolicy(MarFamilyPolicy):
    """MAR as a policy. A prompt is a class: its number as text ("207"), or a name of `class_names`.

    Args:
        vae: the KL-16 autoencoder; frozen.
        class_names: name -> number.

    Raises:
        InputError: the parts do not fit together.
    """

    transformer: Mar

    def __init__(self, transformer: Mar, vae: Kl16, class_names: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._join(transformer, transformer.config, vae)
        self.class_names = dict(class_names or {})

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Class numbers int64 [B, 1, 1]; -1 stands for no class."""
        numbers = [self.class_names.get(prompt, int(prompt) if prompt.isdecimal() else -1) for prompt in prompts]
        for prompt, number in zip(prompts, numbers, strict=True):
            if not 0 <= number < self.transformer.config.class_num:
                last = self.transformer.config.class_num - 1
                hint = f"a prompt is a number 0..{last}" + (" or one of the class names" if self.class_names else "")
                raise InputError("the model knows no such class", where=f"prompt {prompt!r}", hint=hint)
        rows = torch.tensor(numbers, device=self.device)[:, None, None]
        return Conditioning(rows, torch.full((1, 1), -1, device=self.device))

    def condition(self, conditioning: Conditioning) -> Tensor:
        """Class embeddings [B, 1, De], `fake_latent` for no class; gradient flows."""
        rows = torch.cat([self.transformer.class_emb.weight, self.transformer.fake_latent])
        return rows[conditioning.text[:, 0]]  # no class is the last row

    def condition_parameters(self) -> list[nn.Parameter]:
        return [self.transformer.class_emb.weight, self.transformer.fake_latent]
