"""Every recorded folder passes its check, one of other sizes passes too, and nothing that is wrong with one does."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mar_grpo.diffusion.flow import FlowSchedule
from mar_grpo.models.nova import mask_schedule
from tests.conformance import __main__ as runner
from tests.conformance import nova
from tests.conformance.recorder import Recorder

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {name: GOLDEN / name / "a" for name in runner.SETS if (GOLDEN / name / "a").is_dir()}

NOVA = {
    "_class_name": "NOVATransformer3DModel",
    "image_dim": 3,
    "image_size": [32, 64],
    "image_stride": 8,
    "text_token_dim": 20,
    "text_token_len": 7,
    "image_base_size": [2, 4],
    "video_base_size": [1, 1, 2],
    "arch": ["vit_d3w16", "vit_d2w16", "mlp_d1w12"],
}
NOVA_PARAMS: dict[str, Any] = {
    "heads": 2, "n_prompts": 2, "gens": 3, "ar_steps": 5, "T": 3, "S": 2, "top": 0.2, "thresh": 0.1, "beta": 0.05,
    "sel_mask": [1, 3], "k": 2, "fm": {"num_train_timesteps": 1000, "shift": 3.0},
    "ddpm": {"num_train_timesteps": 500, "clip_sample": True, "timestep_spacing": "trailing"},
}  # fmt: skip


def nova_folder(folder: Path) -> Path:
    """Rectangular latents, other depths, widths, heads, counts and schedules than the recorded folder."""
    draw = torch.Generator().manual_seed(1)
    template = json.loads((FOLDERS["nova"] / "manifest.json").read_text())
    images, length, steps, extra, width, latent = 6, 8, NOVA_PARAMS["T"], NOVA_PARAMS["S"], 16, (3, 4, 8)
    counts = mask_schedule(length, NOVA_PARAMS["ar_steps"])
    chosen = {"1": [0, 2], "3": [1, 0]}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def latents(*leading: int) -> Tensor:
        return normal(*leading, *latent)

    def order(count: int = length) -> Tensor:
        return torch.stack([torch.randperm(length, generator=draw)[:count] for _ in range(images)])

    inputs = {
        "embed.text_features_0": normal(3, 20), "embed.text_features_1": normal(7, 20),
        "embed.patchify_in": latents(2),
        "head.x": latents(images), "head.z": normal(images, length, width), "head.pred_ids": order(3)[..., None],
        "head.t": torch.rand(images, generator=draw) * 1000,
        "guidance.cond_uncond": normal(6, 5, 4),
        "step_ddpm.x": latents(steps), "step_ddpm.eps": latents(steps), "step_ddpm.prev": latents(steps),
        "grpo.rewards_per_func": normal(images, 3), "grpo.mte_init_noise": latents(extra, images),
        "grpo.mte_step_noise": latents(extra, steps, images),
        "grpo.ref.image_encoder.norm.weight": normal(width), "grpo.ref.text_embed.proj.bias": normal(width),
        "grpo.ref.image_encoder.blocks.0.mlp.fc2.bias": normal(width),
        "grpo_ddpm.mask_step": torch.tensor(2), "grpo_ddpm.diff_index": torch.tensor([1, 0]),
        "grpo_ddpm.cur": latents(2, images), "grpo_ddpm.next": latents(2, images),
        "formula.log_prob": normal(5, 2, 3, 4), "formula.mte_log_prob": normal(3, 5, 2, 3, 4),
        "formula.mean": normal(5, 2, 3, 4), "formula.ref_mean": normal(5, 2, 3, 4),
        "formula.advantage": normal(5, 1, 1, 1), "formula.unknown_mask": (normal(5, 2, 3, 4) > 0).float(),
        "formula.critic_mask": (normal(5, 1, 3, 4) > 0).float(),
        "formula.consistency_mask": (normal(5, 1, 3, 4) > 0).float(),
    }  # fmt: skip
    inputs |= {f"grpo.m{i}.diff_index": torch.tensor(j) for i, j in chosen.items()}
    for name, count in (("step_fm", steps), ("step_fm25", 25)):
        flow = FlowSchedule.from_config(NOVA_PARAMS["fm"], count, last_step_deterministic=False)
        index, x, velocity, noise = torch.randint(count, (5,), generator=draw), latents(5), latents(5), latents(5)
        after = [flow.step(j, x[row], velocity[row], noise[row]) for row, j in enumerate(index.tolist())]
        made = {"index": index, "x": x, "v": velocity, "prev": torch.stack(after)}
        inputs |= {f"{name}.{key}": value for key, value in made.items()}
    for name in template["rollouts"]:
        inputs |= {f"gen_{name}.mask_order": order(), f"gen_{name}.init_noise": latents(len(counts), images)}
        inputs[f"gen_{name}.step_noise"] = latents(len(counts), steps, images)
    manifest = template | {
        "params": NOVA_PARAMS, "num_preds": counts, "selected_diff_steps": chosen, "grad_norms": {},
    }  # fmt: skip
    recorder = Recorder(FOLDERS["nova"], manifest, inputs)
    (folder.parent / "config.json").write_text(json.dumps(NOVA))
    nova.check(folder.parent, recorder)
    recorder.write(folder, NOVA)
    return folder


@pytest.fixture(scope="module")
def other_nova(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nova_folder(tmp_path_factory.mktemp("nova") / "b")


@pytest.mark.parametrize("name", FOLDERS)
def test_recorded_folder(name: str) -> None:
    compare = runner.run(name, FOLDERS[name])
    assert compare.ok, "\n".join(compare.report())


def test_a_folder_of_other_sizes(other_nova: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("nova", other_nova) == 0
    assert "formula             4 compared    0.0e+00  atol 1e-05" in capsys.readouterr().out


def change(source: Path, folder: Path, stem: str, key: str, by: float) -> Path:
    """A copy of a folder with one number of one tensor changed; a new tensor where there is none of that key."""
    shutil.copytree(source, folder)
    path = folder / f"{stem}.safetensors"
    tensors = load_file(path)
    values = tensors.get(key, torch.zeros(2)).clone()
    values.view(-1)[-1] += by
    path.chmod(0o644)
    save_file(tensors | {key: values}, path)
    return folder


def call(name: str, folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["conformance", name, str(folder)])
        with pytest.raises(SystemExit) as stopped:
            runner.main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("stem", "key", "by", "said"),
    [
        ("gen_ode_nocfg", "latents", 1e-4, "MISS gen_ode_nocfg.latents"),
        ("grpo", "m3.policy_kl_loss", 1e-5, "MISS grpo.m3.policy_kl_loss"),
        ("grpo", "grad.mask_embed.mask_token", 1.0, "MISS grpo.grad.mask_embed.mask_token"),
        ("embed", "image_pos", float("nan"), "MISS embed.image_pos"),
        ("weights", "image_decoder.head.weight", 0.1, "MISS head.out_tokens"),
        ("head", "one_more", 0.0, "UNCHECKED head.one_more"),
        ("weights", "one_more", 0.0, "UNCHECKED weights.one_more"),
    ],
)
def test_a_changed_tensor_is_named(
    stem: str, key: str, by: float, said: str, other_nova: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("nova", change(other_nova, tmp_path / "changed", stem, key, by)) == 1
    assert any(line.startswith(said) for line in capsys.readouterr().out.splitlines())


def test_a_tensor_that_is_missing_is_named(
    other_nova: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(other_nova, tmp_path / "changed")
    tensors = load_file(folder / "grpo.safetensors")
    del tensors["m1.z"]
    save_file(tensors, folder / "grpo.safetensors")
    assert call("nova", folder) == 1
    assert "MISS grpo.m1.z" in capsys.readouterr().out
