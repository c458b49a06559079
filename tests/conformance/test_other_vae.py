"""The `vae` check on folders of other sizes, recorded from latent diffusion's autoencoder written down as functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.vae import mar_bytes
from tests.conformance.__main__ import run

EPS = 1e-6
CONFIGS: dict[str, dict[str, Any]] = {
    "as published, narrow": {"ch": 32, "ch_mult": [1, 1, 2, 2, 4], "num_res_blocks": 2, "resolution": 256},
    "attention before a downsampling": {"ch": 32, "ch_mult": [2, 1, 3], "num_res_blocks": 1, "resolution": 32},
    "attention in the decoder, other latents": {
        "ch": 64, "ch_mult": [1, 2], "num_res_blocks": 1, "resolution": 32, "z_channels": 6, "embed_dim": 4,
        "decoder_attn_resolutions": [32],
    },
}  # fmt: skip


class Ldm:
    """The published forward on published names (facts: CompVis latent diffusion; GroupNorm(32), swish, one head)."""

    def __init__(self, weights: dict[str, Tensor], levels: int, blocks: int) -> None:
        self.weights, self.levels, self.blocks = weights, levels, blocks
        self.seen: dict[str, Tensor] = {}

    def conv(self, x: Tensor, name: str, **options: int) -> Tensor:
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **options)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, 32, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPS)

    def block(self, x: Tensor, name: str) -> Tensor:
        h = self.conv(F.silu(self.norm(x, f"{name}.norm1")), f"{name}.conv1", padding=1)
        h = self.conv(F.silu(self.norm(h, f"{name}.norm2")), f"{name}.conv2", padding=1)
        shortcut = f"{name}.nin_shortcut"
        return h + (self.conv(x, shortcut) if f"{shortcut}.weight" in self.weights else x)

    def attention(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.q.weight" not in self.weights:
            return x
        h = self.norm(x, f"{name}.norm")
        q, k, v = (self.conv(h, f"{name}.{part}").flatten(2) for part in "qkv")
        share = (torch.einsum("bci,bcj->bij", q, k) * x.shape[1] ** -0.5).softmax(dim=2)
        return x + self.conv(torch.einsum("bij,bcj->bci", share, v).view_as(x), f"{name}.proj_out")

    def mid(self, x: Tensor, name: str) -> Tensor:
        x = self.attention(self.block(x, f"{name}.mid.block_1"), f"{name}.mid.attn_1")
        return self.block(x, f"{name}.mid.block_2")

    def out(self, x: Tensor, name: str) -> Tensor:
        return self.conv(F.silu(self.norm(x, f"{name}.norm_out")), f"{name}.conv_out", padding=1)

    def encode(self, x: Tensor) -> Tensor:
        x = self.conv(x, "encoder.conv_in", padding=1)
        for level in range(self.levels):
            for index in range(self.blocks):
                x = self.block(x, f"encoder.down.{level}.block.{index}")
                x = self.attention(x, f"encoder.down.{level}.attn.{index}")
            if level < self.levels - 1:
                x = self.conv(F.pad(x, (0, 1, 0, 1)), f"encoder.down.{level}.downsample.conv", stride=2)
            self.seen[f"enc.down{level}_out"] = x
        self.seen["enc.h"] = self.out(self.mid(x, "encoder"), "encoder")
        return self.conv(self.seen["enc.h"], "quant_conv")

    def decode(self, z: Tensor) -> Tensor:
        self.seen["dec.post_quant"] = self.conv(z, "post_quant_conv")
        x = self.mid(self.conv(self.seen["dec.post_quant"], "decoder.conv_in", padding=1), "decoder")
        self.seen["dec.mid"] = x
        for level in reversed(range(self.levels)):
            for index in range(self.blocks + 1):
                x = self.block(x, f"decoder.up.{level}.block.{index}")
                x = self.attention(x, f"decoder.up.{level}.attn.{index}")
            if level:
                x = self.conv(F.interpolate(x, scale_factor=2.0), f"decoder.up.{level}.upsample.conv", padding=1)
        return self.out(x, "decoder")


def record(folder: Path, config: dict[str, Any]) -> Path:
    settings = Kl16Config.from_dict(config)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, like in Kl16(settings, mar_bytes).published_state().items():
        drawn = torch.randn(like.shape, generator=generator)
        centre, spread = (1.0, 0.2) if "norm" in name and name.endswith("weight") else (0.0, 0.1)
        weights[name] = centre + drawn * (like[0].numel() ** -0.5 if like.ndim > 1 else spread)
    ldm = Ldm(weights, len(settings.ch_mult), settings.num_res_blocks)
    side = 2 ** (len(settings.ch_mult) - 1)
    image = torch.rand(2, 3, 2 * side, 3 * side, generator=generator) * 2 - 1
    moments = ldm.encode(image)
    mean, log_variance = moments.chunk(2, dim=1)
    log_variance = log_variance.clamp(-30, 20)
    noise, z = (torch.randn(mean.shape, generator=generator) for _ in range(2))
    pixels = ldm.decode(z)
    tensors = ldm.seen | {
        "image": image,
        "enc.moments": moments,
        "enc.mean": mean,
        "enc.logvar": log_variance,
        "enc.noise": noise,
        "enc.sample": mean + (0.5 * log_variance).exp() * noise,
        "enc.kl": 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(dim=(1, 2, 3)),
        "enc.scaled_mode": mean * 0.2325,
        "dec.z": z,
        "dec.image": pixels,
        "dec.u8_harmon": (127.5 * pixels + 128).clamp(0, 255).byte(),
        "dec.u8_mar": ((pixels + 1) / 2 * 255).clamp(0, 255).round().byte(),
    }
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "vectors.safetensors")
    save_file(weights, folder / "weights.safetensors")
    manifest = {
        "config": settings.model_dump(mode="json", exclude={"scaling_factor"}),
        "weights": {name: list(tensor.shape) for name, tensor in weights.items()},
        "tensors": {name: {"shape": list(tensor.shape)} for name, tensor in tensors.items()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_other_sizes(tmp_path: Path, name: str) -> None:
    compare = run("vae", record(tmp_path / "b", CONFIGS[name]))
    assert compare.ok, "\n".join(compare.report())


def test_what_is_changed_or_not_checked_is_named(tmp_path: Path) -> None:
    folder = record(tmp_path / "b", CONFIGS["attention before a downsampling"])
    tensors = load_file(folder / "vectors.safetensors")
    for name in ("enc.down1_out", "enc.kl", "dec.mid"):
        changed = tensors | {name: tensors[name] * 1.001}
        save_file(changed, folder / "vectors.safetensors")
        assert any(line.startswith(f"MISS {name}") for line in run("vae", folder).report())
    save_file(tensors | {"enc.more": torch.ones(1)}, folder / "vectors.safetensors")
    assert "UNCHECKED enc.more" in run("vae", folder).report()
