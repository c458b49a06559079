"""The KL-16 autoencoder of MAR and Harmon, which is stored in the form of latent diffusion (LDM, arXiv 2112.10752).

The network is diffusers' AutoencoderKL. Its published files have LDM's names; `Kl16.published_names` is the table:

    AutoencoderKL                                  LDM
    encoder.down_blocks.I.resnets.J.               encoder.down.I.block.J.
    encoder.down_blocks.I.attentions.J.            encoder.down.I.attn.J.
    encoder.down_blocks.I.downsamplers.0.conv.     encoder.down.I.downsample.conv.
    decoder.up_blocks.I.resnets.J.                 decoder.up.(levels - 1 - I).block.J.     level 0 is full resolution
    decoder.up_blocks.I.upsamplers.0.conv.         decoder.up.(levels - 1 - I).upsample.conv.
    X.mid_block.resnets.J., attentions.0.          X.mid.block_(J + 1)., X.mid.attn_1.
    conv_shortcut, conv_norm_out                   nin_shortcut, norm_out
    group_norm, to_q, to_k, to_v, to_out.0         norm, q, k, v, proj_out (1x1 convolutions: [c, c, 1, 1] for [c, c])

Everything else has the same name and shape. AutoencoderKL has the first level's width where LDM has `ch`, and one
number for `z_channels` and `embed_dim`; where they differ (never in the published file) single layers are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn

from mar_grpo.errors import InputError
from mar_grpo.models.build import initialise, on_meta, read_published
from mar_grpo.models.vae import Vae, nova_bytes

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

_NAMES = (
    (r"\b(down|up)_blocks\.(\d+)\.resnets\.", r"\1.\2.block."),
    (r"\b(down|up)_blocks\.(\d+)\.attentions\.", r"\1.\2.attn."),
    (r"\b(down|up)_blocks\.(\d+)\.(down|up)samplers\.0\.", r"\1.\2.\3sample."),
    (r"\bmid_block\.resnets\.0\.", "mid.block_1."),
    (r"\bmid_block\.resnets\.1\.", "mid.block_2."),
    (r"\bmid_block\.attentions\.0\.", "mid.attn_1."),
    (r"\bconv_shortcut\.", "nin_shortcut."),
    (r"\bconv_norm_out\.", "norm_out."),
    (r"\bgroup_norm\.", "norm."),
    (r"\bto_([qkv])\.", r"\1."),
    (r"\bto_out\.0\.", "proj_out."),
)


class Kl16Config(BaseModel):
    """An autoencoder in LDM's terms; the defaults are the published one (66.5M parameters, 16 px a latent).

    Args:
        ch: channels at full resolution, before the first level.
        ch_mult: channels of each level as a multiple of `ch`; each level but the last halves the resolution.
        num_res_blocks: residual blocks of a level; the decoder has one more.
        z_channels: channels out of the encoder and into the decoder.
        embed_dim: channels of a latent.
        resolution: nominal image side, px; only says which levels the next two mean.
        encoder_attn_resolutions: sides of the levels that have attention after each block.
        decoder_attn_resolutions: the same of the decoder.
        scaling_factor: a latent is the posterior mean times this.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ch: PositiveInt = 128
    ch_mult: tuple[PositiveInt, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: PositiveInt = 2
    z_channels: PositiveInt = 16
    embed_dim: PositiveInt = 16
    double_z: Literal[True] = True
    resolution: PositiveInt = 256
    encoder_attn_resolutions: tuple[int, ...] = (16,)
    decoder_attn_resolutions: tuple[int, ...] = ()
    groupnorm_groups: PositiveInt = 32
    groupnorm_eps: float = 1e-6
    in_channels: Literal[3] = 3
    out_ch: Literal[3] = 3
    scaling_factor: float = 0.2325

    @model_validator(mode="after")
    def _check(self) -> Kl16Config:
        for channels in (self.ch, *self.channels):
            if channels % self.groupnorm_groups:
                raise ValueError(f"{channels} channels do not split into {self.groupnorm_groups} groups")
        return self

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, where: str = "config.json: vae") -> Kl16Config:
        """Raises InputError naming the key that is unknown or wrong."""
        return read_published(cls, config, where=where)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, torch.Size], *, where: str) -> Kl16Config:
        """What LDM tensors of these names and shapes belong to; they determine all but groups and epsilon.

        Where half of them or more are the published ones it is the published configuration, so that a wrong one among
        them is told from the others.

        Raises:
            InputError: they are no such autoencoder's.
        """
        published = Kl16(cls(), nova_bytes)
        wanted = published.published_state()
        if 2 * sum(shapes.get(name) == tensor.shape for name, tensor in wanted.items()) >= len(wanted):
            return published.settings
        levels, blocks = (
            1 + max((int(found[1]) for name in shapes if (found := re.match(pattern, name))), default=-1)
            for pattern in (r"encoder\.down\.(\d+)\.", r"encoder\.down\.\d+\.block\.(\d+)\.")
        )
        sides = [published.settings.resolution >> level for level in range(levels)]

        def attended(prefix: str) -> tuple[int, ...]:
            return tuple(
                side
                for level, side in enumerate(sides)
                if any(name.startswith(f"{prefix}.{level}.attn.") for name in shapes)
            )

        try:
            ch = shapes["encoder.conv_in.weight"][0]
            return cls(
                ch=ch,
                ch_mult=tuple(shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] // ch for level in range(levels)),
                num_res_blocks=blocks,
                z_channels=shapes["post_quant_conv.weight"][0],
                embed_dim=shapes["post_quant_conv.weight"][1],
                encoder_attn_resolutions=attended("encoder.down"),
                decoder_attn_resolutions=attended("decoder.up"),
            )
        except KeyError as error:
            raise InputError(f"tensor {error.args[0]} of the KL-16 autoencoder is missing", where=where) from None
        except (ValidationError, IndexError, ZeroDivisionError) as error:
            raise InputError("no KL-16 autoencoder has tensors of these shapes", where=where) from error

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of each level, full resolution first."""
        return tuple(self.ch * factor for factor in self.ch_mult)


class Kl16(Vae):
    """The autoencoder of MAR (with `mar_bytes`) and Harmon (`harmon_bytes`); without a generator on the meta device."""

    def __init__(
        self, settings: Kl16Config, to_bytes: Callable[[Tensor], Tensor], generator: torch.Generator | None = None
    ) -> None:
        model = on_meta(lambda: _network(settings))
        super().__init__(initialise(model, generator) if generator else model, to_bytes)
        self.settings = settings
        self.eval()

    @property
    def config(self) -> dict[str, Any]:
        """The settings as JSON (`Kl16Config.from_dict` reads them)."""
        return self.settings.model_dump(mode="json")

    def published_names(self) -> dict[str, str]:
        """Name in `self.model` -> name in LDM, of every tensor (module docstring)."""
        return {name: self._published(name) for name in self.model.state_dict()}

    def _published(self, name: str) -> str:
        last = len(self.settings.ch_mult) - 1
        name = re.sub(r"\bup_blocks\.(\d+)", lambda found: f"up_blocks.{last - int(found[1])}", name)
        for ours, theirs in _NAMES:
            name = re.sub(ours, theirs, name)
        return name

    def published_state(self) -> dict[str, Tensor]:
        """Name in LDM -> tensor in LDM's shape, a view of ours."""
        names = self.published_names()
        return {
            names[ours]: tensor[..., None, None] if re.search(r"\.to_(q|k|v|out\.0)\.weight$", ours) else tensor
            for ours, tensor in self.model.state_dict().items()
        }


def _network(settings: Kl16Config) -> AutoencoderKL:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL  # seconds, as in text.py
    from diffusers.models.resnet import ResnetBlock2D

    sides = [settings.resolution >> level for level in range(len(settings.ch_mult))]
    down = [("Attn" if side in settings.encoder_attn_resolutions else "") + "DownEncoderBlock2D" for side in sides]
    up = [("Attn" if side in settings.decoder_attn_resolutions else "") + "UpDecoderBlock2D" for side in sides]
    model = AutoencoderKL(
        in_channels=settings.in_channels,
        out_channels=settings.out_ch,
        down_block_types=down,
        up_block_types=up[::-1],
        block_out_channels=list(settings.channels),
        layers_per_block=settings.num_res_blocks,
        latent_channels=settings.z_channels,
        norm_num_groups=settings.groupnorm_groups,
        sample_size=settings.resolution,
        scaling_factor=settings.scaling_factor,
    )
    first = settings.channels[0]
    if settings.ch != first:
        model.encoder.conv_in = nn.Conv2d(settings.in_channels, settings.ch, 3, padding=1)
        model.encoder.down_blocks[0].resnets[0] = ResnetBlock2D(
            in_channels=settings.ch,
            out_channels=first,
            temb_channels=None,  # type: ignore[arg-type]
            groups=settings.groupnorm_groups,
        )
    if settings.embed_dim != settings.z_channels:
        model.quant_conv = nn.Conv2d(2 * settings.z_channels, 2 * settings.embed_dim, 1)
        model.post_quant_conv = nn.Conv2d(settings.embed_dim, settings.z_channels, 1)
        model.register_to_config(latent_channels=settings.embed_dim)
    for layer in model.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.eps = settings.groupnorm_eps
    return model
