"""Images to latents and back: scale, conversions, gradient, and input that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from mar_grpo.errors import InputError
from mar_grpo.models import vae as vae_module
from mar_grpo.models.vae import Vae, nova_bytes, to_pixels
from tests.unit import tiny


def build(**changes: Any) -> Vae:
    return Vae.from_config(tiny.VAE | changes, torch.Generator().manual_seed(0))


def pictures(number: int, size: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, size, size, 3), dtype=np.uint8)


def test_latents_are_the_scaled_mean_of_diffusers() -> None:
    vae = build(scaling_factor=0.18215, shift_factor=0.5)
    theirs = AutoencoderKL(**{key: value for key, value in vae.config.items() if key != "_class_name"}).eval()
    theirs.load_state_dict(vae.model.state_dict())
    pixels = torch.from_numpy(pictures(2)).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        expected = (theirs.encode(pixels).latent_dist.mean - 0.5) * 0.18215
        decoded = theirs.decode(expected / 0.18215 + 0.5).sample
    latents = vae.encode(pictures(2))
    assert latents.shape == (2, 4, 8, 8) and latents.dtype == torch.float32
    torch.testing.assert_close(latents, expected)
    assert torch.equal(vae.decode(latents), nova_bytes(decoded))


def test_statistics_per_channel_replace_the_shift() -> None:
    mean, std = [0.1, -0.2, 0.3, 0.0], [1.0, 2.0, 0.5, 4.0]
    vae = build(latents_mean=mean, latents_std=std, shift_factor=9.0)
    raw = vae.moments(to_pixels(torch.from_numpy(pictures(1))))[0]
    expected = (raw - torch.tensor(mean).view(1, 4, 1, 1)) / torch.tensor(std).view(1, 4, 1, 1) * 0.5
    torch.testing.assert_close(vae.encode(pictures(1)), expected.detach())
    torch.testing.assert_close(vae.unscale(vae.scale(raw)), raw)


def test_bytes_are_clamped_and_truncated() -> None:
    pixels = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    assert nova_bytes(pixels)[0, 0, :, 0].tolist() == [0, 0, 127, 254, 255, 255]


def test_decoding_does_not_change_its_input() -> None:
    vae, latents = build(), torch.ones(1, 4, 8, 8)
    vae.decode(latents)
    assert torch.equal(latents, torch.ones(1, 4, 8, 8))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, images = build(), pictures(5)
    latents = vae.encode(images)
    decoded = vae.decode(latents)
    monkeypatch.setattr(vae_module, "CHUNK_PIXELS", 2 * 32 * 32)
    torch.testing.assert_close(vae.encode(images), latents)
    assert (vae.decode(latents).int() - decoded.int()).abs().max() <= 1


def test_training_reaches_every_weight() -> None:
    vae = build()
    mean, log_variance = vae.moments(to_pixels(torch.from_numpy(pictures(2))))
    (vae.decode_float(vae.scale(mean)).square().mean() + log_variance.mean()).backward()
    assert all(parameter.grad is not None for parameter in vae.parameters())


def test_building_leaves_the_global_generator_alone_and_follows_the_seed() -> None:
    state = torch.get_rng_state()
    assert torch.equal(build().encode(pictures(1)), build().encode(pictures(1)))
    assert torch.equal(state, torch.get_rng_state())


def test_full_size_autoencoder() -> None:
    """Stable Diffusion's autoencoder: 335 MB as float32, eight pixels a latent."""
    published = {
        "_class_name": "AutoencoderKL",
        "_diffusers_version": "0.30.0",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "latent_channels": 4,
        "sample_size": 512,
        "scaling_factor": 0.18215,
    }
    vae = Vae.from_config(published)
    assert sum(parameter.numel() for parameter in vae.parameters()) == 83_653_863
    assert vae.stride == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "AutoencoderKLOpenSora"}, "AutoencoderKLOpenSora is not supported"),
        ({"latent_chanels": 4}, "no option latent_chanels"),
        ({"norm_num_groups": 3}, "refuses its configuration"),
        ({"down_block_types": ["Nonsense"] * 3}, "refuses its configuration"),
    ],
)
def test_wrong_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build(**changes)
    assert caught.value.exit_code == 2 and "vae/config.json" in str(caught.value)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((0, 32, 32, 3), np.uint8),
        np.zeros((1, 32, 32, 3), np.float32),
        np.zeros((1, 3, 32, 32), np.uint8),
        np.zeros((32, 32, 3), np.uint8),
        np.zeros((1, 30, 32, 3), np.uint8),
    ],
    ids=["none", "floats", "channels first", "no batch", "odd size"],
)
def test_wrong_images(images: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"images must be uint8|multiples of 4"):
        build().encode(images)
