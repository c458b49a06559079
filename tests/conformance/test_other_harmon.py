"""A Harmon folder of other sizes passes: an untrained grid, other depths and counts, linear guidance, temperature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.models.mar import mask_schedule
from tests.conformance import harmon
from tests.conformance.__main__ import run
from tests.conformance.recorder import Recorder
from tests.conformance.test_golden import FOLDERS, change

LLM: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip
MAR: dict[str, Any] = {
    "type": "mar_large", "img_size": 64, "vae_stride": 8, "patch_size": 2, "vae_embed_dim": 3, "class_num": 4,
    "buffer_size": 3, "diffloss_d": 1, "diffloss_w": 20, "num_sampling_steps": "ddim5",
}  # fmt: skip
ARCH: dict[str, Any] = {
    "encoder_embed_dim": 16, "encoder_depth": 1, "encoder_num_heads": 2, "decoder_embed_dim": 24, "decoder_depth": 3,
    "decoder_num_heads": 3, "mlp_ratio": 2.0, "norm_eps": 1e-5, "note": "",
}  # fmt: skip
GRID, LENGTH, CHANNELS, AR_STEPS, DIFFUSION_STEPS, BATCH, SEEDS = (2, 5), 10, 12, 5, 5, 3, 2
ROOM = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("harmon") / "b"
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def order() -> Tensor:
        return torch.randperm(LENGTH, generator=draw)

    ids = torch.randint(31, (2 * BATCH, 4), generator=draw)
    ids[BATCH:] = ids[BATCH]
    states = DIFFUSION_STEPS + 1
    inputs = {
        "prompt.input_ids": ids, "prompt.attention_mask": ROOM,
        "fwd.tokens": normal(2 * BATCH, LENGTH, CHANNELS),
        "fwd.mask": torch.stack([order() for _ in range(2 * BATCH)]).ge(4).float(),
        "rollout.orders": torch.stack([order() for _ in range(BATCH)]),
        "rollout.noise": normal(AR_STEPS, states, BATCH, LENGTH, CHANNELS),
        "rollout.seed_noise": normal(SEEDS, states, BATCH, LENGTH, CHANNELS),
        "adv.rewards": normal(BATCH, 2), "adv2.rewards": torch.cat([normal(4, 1), torch.ones(4, 1)], dim=1),
        "loss.diff_idx": torch.tensor([2, 0]),
        "gauss.x": normal(3, 4), "gauss.mean": normal(3, 4), "gauss.std": torch.logspace(-8, 1, 12).view(3, 4),
    }  # fmt: skip
    counts = mask_schedule(LENGTH, AR_STEPS)
    template = json.loads((FOLDERS["harmon"] / "manifest.json").read_text())
    manifest = template | {
        "llm": LLM, "mar": MAR, "mar_arch": ARCH, "image_shape": list(GRID), "B": BATCH, "T": DIFFUSION_STEPS,
        "buffer_size": 3, "num_iter": AR_STEPS, "cfg": 1.7, "cfg_schedule": "linear", "temperature": 0.8,
        "num_seeds": SEEDS, "top_mask_percent": 0.2, "latent_sim_thresh": 0.05, "beta": 0.05,
        "mask_schedule": [{"predicted": count} for count in counts],
    }  # fmt: skip
    del manifest["weights"]
    recorder = Recorder(FOLDERS["harmon"], manifest, inputs)
    harmon.check(where, recorder)
    for name, scalars in recorder.manifest["loss_scalars"].items():
        recorder.manifest["loss_scalars"][name] = dict(
            zip(scalars, recorder.golden(f"loss.{name}.scalars").tolist(), strict=True)
        )
    recorder.write(where)
    return where


def test_a_folder_of_other_sizes(folder: Path) -> None:
    compare = run("harmon", folder)
    assert compare.ok, "\n".join(compare.report())


@pytest.mark.parametrize(
    ("key", "by"),
    [
        ("rollout.tokens", 1e3), ("rollout.predicted", 1.0), ("loss.plain.step1.scalars", 1e3),
        ("loss.full.step3.grad.mask_token", 1e3), ("gauss.logp", 0.1),
    ],
)  # fmt: skip
def test_a_changed_tensor_is_named(key: str, by: float, folder: Path, tmp_path: Path) -> None:
    stem, _, rest = key.partition(".")
    compare = run("harmon", change(folder, tmp_path / "c", stem, rest, by))
    assert any(line.startswith(f"MISS {key}:") for line in compare.report())
