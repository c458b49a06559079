"""The KL-16 autoencoder: its published names, its configuration from shapes, and the conversions to bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mar_grpo.errors import InputError
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.vae import harmon_bytes, mar_bytes, nova_bytes

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = {"ch": 32, "ch_mult": [1, 2, 1], "num_res_blocks": 1, "resolution": 64}


def shapes(vae: Kl16) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in vae.published_state().items()}


def test_the_default_is_the_published_autoencoder() -> None:
    vae = Kl16(Kl16Config(), mar_bytes)
    published = json.loads((GOLDEN / "full_size_layouts.json").read_text())["kl16"]
    assert {name: list(shape) for name, shape in shapes(vae).items()} == {
        name: entry["shape"] for name, entry in published["tensors"].items()
    }
    assert sum(parameter.numel() for parameter in vae.parameters()) == published["params"]
    assert vae.stride == 16
    assert Kl16Config.from_shapes(shapes(vae), where="kl16.ckpt") == Kl16Config()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ch_mult": [2, 1, 1], "num_res_blocks": 2},
        {"encoder_attn_resolutions": [32], "decoder_attn_resolutions": [16, 64]},
        {"z_channels": 8, "embed_dim": 4, "encoder_attn_resolutions": []},
    ],
)
def test_any_configuration_is_read_back_from_shapes_and_runs(changes: dict[str, Any]) -> None:
    settings = Kl16Config.from_dict(SMALL | changes)
    vae = Kl16(settings, harmon_bytes, torch.Generator().manual_seed(0))
    found = Kl16Config.from_shapes(shapes(vae), where="file")
    assert shapes(Kl16(found, harmon_bytes)) == shapes(vae)
    images = torch.randint(0, 256, (1, 16, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    latents = vae.encode(images)
    assert latents.shape == (1, settings.embed_dim, 4, 2)
    assert vae.decode(latents).shape == images.shape
    assert Kl16Config.from_dict(vae.config) == settings


def test_bytes() -> None:
    levels = torch.tensor([-300.0, 63.75, 64.25, 127.5, 254.75, 300.0])
    pixels = (levels / 127.5 - 1).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    assert nova_bytes(pixels)[0, 0, :, 0].tolist() == [0, 63, 64, 127, 254, 255]
    assert harmon_bytes(pixels)[0, 0, :, 0].tolist() == [0, 64, 64, 128, 255, 255]
    assert mar_bytes(pixels)[0, 0, :, 0].tolist() == [0, 64, 64, 128, 255, 255]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chanels": 3}, "unknown key 'chanels'"),
        ({"ch": 48}, "48 channels do not split into 32 groups"),
        ({"double_z": False}, "double_z: "),
        ({"ch_mult": [0]}, r"ch_mult\.0: "),
    ],
)
def test_wrong_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Kl16Config.from_dict(SMALL | changes)
    assert "config.json: vae" in str(caught.value)


def test_wrong_tensors() -> None:
    good = shapes(Kl16(Kl16Config.from_dict(SMALL), mar_bytes))
    with pytest.raises(InputError, match=r"tensor post_quant_conv\.weight .*missing \(a file\)"):
        Kl16Config.from_shapes({k: v for k, v in good.items() if k != "post_quant_conv.weight"}, where="a file")
    with pytest.raises(InputError, match=r"tensors of these shapes \(a file\)"):
        Kl16Config.from_shapes(good | {"encoder.conv_in.weight": torch.Size([33, 3, 3, 3])}, where="a file")
