"""The image autoencoder: diffusers' AutoencoderKL, its latent scale, and the conversions to and from bytes.

Latents are what the generator sees: (posterior mean - offset) / spread * scaling_factor. `offset` and `spread` are the
configuration's `latents_mean` and `latents_std` (one number a channel) where given, else `shift_factor` and 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mar_grpo.errors import InputError
from mar_grpo.models.build import initialise, on_meta

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

CHUNK_PIXELS = 2**18  # images coded at once: 64 of 64 x 64 px, one of 512 x 512; bounds memory, changes no picture


class Vae(nn.Module):
    """Images uint8 [B, H, W, 3] <-> latents float32 [B, c, h, w].

    Args:
        to_bytes: pixels [B, 3, H, W] in [-1, 1] -> images; model families differ in how they round.
    """

    def __init__(self, model: AutoencoderKL, to_bytes: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.to_bytes = model, to_bytes or nova_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], generator: torch.Generator | None = None) -> Vae:
        """An autoencoder from the content of vae/config.json; without a generator its weights are left on meta.

        Raises:
            InputError: another class, an unknown key, or values AutoencoderKL refuses.
        """
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL  # seconds, as in text.py

        name = config.get("_class_name", "AutoencoderKL")
        if name != "AutoencoderKL":
            raise InputError(f"autoencoder class {name} is not supported", where="vae/config.json: _class_name")
        options = {key: value for key, value in config.items() if not key.startswith("_")}
        unknown = sorted(options.keys() - inspect.signature(AutoencoderKL.__init__).parameters.keys())
        if unknown:
            raise InputError(f"AutoencoderKL has no option {', '.join(unknown)}", where="vae/config.json")
        try:
            model = on_meta(lambda: AutoencoderKL(**options))
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(f"AutoencoderKL refuses its configuration: {error}", where="vae/config.json") from error
        return cls(initialise(model, generator) if generator else model).eval()

    @property
    def config(self) -> dict[str, Any]:
        """The content of vae/config.json. `self.model.register_to_config(scaling_factor=...)` changes a value."""
        options = {key: value for key, value in self.model.config.items() if not key.startswith("_")}
        return {"_class_name": "AutoencoderKL"} | options

    @property
    def stride(self) -> int:
        """Pixels per latent cell and axis."""
        return 2 ** (len(self.model.config["block_out_channels"]) - 1)

    def moments(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and log-variance, unscaled [B, c, h, w], of pixels [B, 3, H, W] in [-1, 1]; with gradient."""
        posterior = self.model.encode(pixels.to(self.model.dtype)).latent_dist
        return posterior.mean.float(), posterior.logvar.float()

    @torch.no_grad()
    def encode(self, images: Tensor | np.ndarray) -> Tensor:
        """Latents [B, c, h, w] (posterior mean, scaled) of images uint8 [B, H, W, 3]."""
        images = torch.as_tensor(images)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != 3 or not len(images):
            raise InputError(f"images must be uint8 [B, H, W, 3], got {images.dtype} {list(images.shape)}")
        if images.shape[1] % self.stride or images.shape[2] % self.stride:
            raise InputError(f"image sides {list(images.shape[1:3])} must be multiples of {self.stride}")
        chunks = images.split(max(1, CHUNK_PIXELS // images[0, :, :, 0].numel()))
        return torch.cat([self.scale(self.moments(to_pixels(part.to(self.model.device)))[0]) for part in chunks])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images uint8 [B, H, W, 3] of latents [B, c, h, w]."""
        chunks = latents.split(max(1, CHUNK_PIXELS // (latents[0, 0].numel() * self.stride**2)))
        return torch.cat([self.to_bytes(self.decode_float(part)) for part in chunks])

    def decode_float(self, latents: Tensor) -> Tensor:
        """Pixels float32 [B, 3, H, W], about [-1, 1] and not clamped, of scaled latents; with gradient."""
        return self.model.decode(self.unscale(latents).to(self.model.dtype)).sample.float()

    def scale(self, mean: Tensor) -> Tensor:
        """Posterior mean -> latents."""
        offset, spread = self._statistics(mean)
        return (mean - offset) / spread * self.model.config["scaling_factor"]

    def unscale(self, latents: Tensor) -> Tensor:
        """Latents -> posterior mean; the inverse of `scale`."""
        offset, spread = self._statistics(latents)
        return latents / self.model.config["scaling_factor"] * spread + offset

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config = self.model.config
        offset = like.new_tensor(config["latents_mean"] or [config["shift_factor"] or 0.0]).view(1, -1, 1, 1)
        spread = like.new_tensor(config["latents_std"] or [1.0]).view(1, -1, 1, 1)
        return offset, spread


def to_pixels(images: Tensor) -> Tensor:
    """Float32 [B, 3, H, W] in [-1, 1] of images uint8 [B, H, W, 3]: x / 127.5 - 1."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def nova_bytes(pixels: Tensor) -> Tensor:
    """Images uint8 [B, H, W, 3] of pixels [B, 3, H, W]: clamp(127.5 x + 127.5), truncated (NOVA's conversion)."""
    return _bytes(127.5 * pixels + 127.5)


def harmon_bytes(pixels: Tensor) -> Tensor:
    """As `nova_bytes`: clamp(127.5 x + 128), truncated (Harmon's conversion)."""
    return _bytes(127.5 * pixels + 128)


def mar_bytes(pixels: Tensor) -> Tensor:
    """As `nova_bytes`: clamp((x + 1) / 2 * 255), rounded half to even (the conversion of MAR's evaluation)."""
    return _bytes(((pixels + 1) / 2 * 255).round())


def _bytes(levels: Tensor) -> Tensor:
    return levels.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
