"""A MAR folder of other sizes passes: rectangular latents, patches, other depths, widths, counts and schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.models.mar import mask_schedule
from tests.conformance import mar
from tests.conformance.__main__ import run
from tests.conformance.recorder import Recorder
from tests.conformance.test_golden import FOLDERS, change

CONFIG: dict[str, Any] = {
    "img_size": 64, "vae_stride": 8, "patch_size": 2, "encoder_embed_dim": 16, "encoder_depth": 1,
    "encoder_num_heads": 2, "decoder_embed_dim": 24, "decoder_depth": 3, "decoder_num_heads": 3, "mlp_ratio": 2.0,
    "vae_embed_dim": 3, "class_num": 4, "buffer_size": 5, "diffloss_d": 1, "diffloss_w": 20, "norm_eps": 1e-5,
}  # fmt: skip
LENGTH, CHANNELS, WIDTH, AR_STEPS, BATCH = 6, 12, 24, 3, 3


def folder_of(where: Path, spacing: str, steps: int) -> Path:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    hidden = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0]]).float()
    order = torch.stack([torch.randperm(LENGTH, generator=draw) for _ in range(BATCH)])
    inputs = {
        "fwd.latent_image": normal(BATCH, 3, 4, 6), "fwd.labels": torch.tensor([3, 0, 1]), "fwd.mask": hidden,
        "head.t_embed_in": torch.tensor([0, 999]), "head.x": normal(4, CHANNELS), "head.z": normal(4, WIDTH),
        "head.t": torch.tensor([0, 7, 500, 998]),
        "step.x": normal(3, CHANNELS), "step.z": normal(3, WIDTH), "step.t": torch.tensor([0, steps - 1, 1]),
        "step100.t": torch.tensor([0, 99, 5, 60]),
        "train.x0": normal(5, CHANNELS), "train.z": normal(5, WIDTH), "train.noise": normal(5, CHANNELS),
        "train.t": torch.tensor([0, 999, 3, 4, 5]), "train.mask": torch.tensor([1.0, 0, 1, 1, 0]),
        "sample.orders": order, "sample.labels": torch.tensor([1, 2, 3]),
        "sample.noise": normal(AR_STEPS, steps + 1, BATCH, LENGTH, CHANNELS),
        "logp.z": normal(2, WIDTH), "logp.noise": normal(steps + 1, 2, CHANNELS),
    }  # fmt: skip
    left = [LENGTH]
    for count in mask_schedule(LENGTH, AR_STEPS):
        left.append(left[-1] - count)
    masked = [{"masked_after": max(1, after)} for after in left[1:]]
    linear = [1 + 0.5 * (LENGTH - row["masked_after"]) / LENGTH for row in masked]
    template = json.loads((FOLDERS["mar"] / "manifest.json").read_text())
    manifest = template | {
        "config": CONFIG, "num_sampling_steps": spacing, "num_iter": AR_STEPS, "mask_schedule": masked,
        "chain_temperature": 0.7,
        "sampling": {
            "nocfg": {"cfg": 1.0, "cfg_schedule": "constant", "temperature": 0.5, "cfg_per_step": [1.0] * AR_STEPS},
            "cfg": {"cfg": 1.5, "cfg_schedule": "linear", "temperature": 1.0, "cfg_per_step": linear},
        },
    }  # fmt: skip
    del manifest["weights"]
    recorder = Recorder(FOLDERS["mar"], manifest, inputs)
    mar.check(where, recorder)
    recorder.write(where)
    return where


@pytest.mark.parametrize(("spacing", "steps"), [("ddim4", 4), ("7", 7), ("2,3", 5)])
def test_a_folder_of_other_sizes(spacing: str, steps: int, tmp_path: Path) -> None:
    compare = run("mar", folder_of(tmp_path / "b", spacing, steps))
    assert compare.ok, "\n".join(compare.report())
    changed = run("mar", change(tmp_path / "b", tmp_path / "c", "sample", "cfg.tokens", float("nan")))
    assert [line.split(":")[0] for line in changed.report() if line.startswith("MISS")] == ["MISS sample.cfg.tokens"]
