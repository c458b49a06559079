"""Checkpoints that are wrong: refused with exit code 2, naming the file and the tensor, and nothing of them is run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mar_grpo.errors import InputError
from mar_grpo.models.checkpoint import load_policy, save_policy
from tests.unit import tiny_mar


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A MAR and a Harmon folder with safetensors, and a MAR as published with torch files."""
    root = tmp_path_factory.mktemp("good")
    return {
        "mar": save_policy(tiny_mar.mar(), root / "mar"),
        "harmon": save_policy(tiny_mar.harmon(), root / "harmon"),
        "torch": save_policy(tiny_mar.mar(), root / "torch", layout="published"),
    }


@pytest.fixture
def copies(good: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Copies that a test may damage."""
    return {name: Path(shutil.copytree(folder, tmp_path / name)) for name, folder in good.items()}


def refused(folder: Path, message: str) -> str:
    with pytest.raises(InputError, match=message) as caught:
        load_policy(folder)
    assert caught.value.exit_code == 2
    assert str(folder) in str(caught.value) or "config.json" in str(caught.value)
    return str(caught.value)


# One tensor of every part.
TENSORS = {
    "mar": ["mar.decoder_blocks.0.attn.qkv.weight", "mar.diffloss.net.input_proj.bias", "mar.class_emb.weight",
            "vae.encoder.mid.attn_1.q.weight", "vae.decoder.conv_out.bias"],
    "harmon": ["llm.model.layers.1.mlp.up_proj.weight", "mar.mask_token", "proj_in.0.weight", "proj_out.2.bias",
               "vae.encoder.down.2.attn.0.norm.weight"],
}  # fmt: skip
CASES = [(family, name) for family, names in TENSORS.items() for name in names]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_one_wrong_tensor(copies: dict[str, Path], family: str, name: str) -> None:
    """Missing, extra, of another shape, NaN, infinite, integers: each is refused by its published name."""
    file = copies[family] / "model.safetensors"
    tensors, folder = load_file(file), copies[family]
    own = name.partition(".")[2] if family == "mar" or name.startswith("vae.") else name

    def damaged(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        copied = dict(tensors)
        change(copied)
        save_file(copied, file)

    damaged(lambda t: t.pop(name))
    refused(folder, rf"tensor {own} missing")
    damaged(lambda t: t.update({f"{name}.more": torch.ones(1)}))
    refused(folder, rf"unexpected tensor {name}\.more")
    damaged(lambda t: t.update({name: torch.cat([tensors[name]] * 2).contiguous()}))
    refused(folder, rf"tensor {name} has shape \[.*\], config\.json asks for \[")
    for value in (float("nan"), float("inf")):
        wrong = tensors[name].clone()
        wrong.view(-1)[-1] = value
        damaged(lambda t, wrong=wrong: t.update({name: wrong}))
        refused(folder, rf"tensor {name} holds values that are not finite")
    damaged(lambda t: t.update({name: tensors[name].int()}))
    refused(folder, rf"tensor {name} holds values that are not finite")
    damaged(lambda t: None)
    load_policy(folder)


@pytest.mark.parametrize("key", ["checkpoint-last.pth", "kl16.ckpt"])
@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99, -1])
def test_a_cut_torch_file(copies: dict[str, Path], key: str, keep: float) -> None:
    file = copies["torch"] / key
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert key in refused(copies["torch"], "cut or damaged|no torch file")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_cut_safetensors_file(copies: dict[str, Path], keep: float) -> None:
    file = copies["harmon"] / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert "model.safetensors" in refused(copies["harmon"], "cut or damaged")


class Runs:
    """Pickled, it asks whoever reads it to run a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("where", ["beside", "inside", "kl16", "old"])
def test_a_pickle_with_code(copies: dict[str, Path], tmp_path: Path, where: str) -> None:
    marker = tmp_path / "executed"
    evil = Runs(f"touch {marker}")
    name = "kl16.ckpt" if where == "kl16" else "checkpoint-last.pth"
    file = copies["torch"] / name
    content = torch.load(file, weights_only=True)
    if where == "inside":
        content["model"]["mask_token"] = evil
    else:
        content["args"] = evil
    torch.save(content, file, _use_new_zipfile_serialization=where != "old")
    shown = refused(copies["torch"], r"pickle asks for code to be run \((posix|nt)\.system\)")
    assert str(file) in shown and not marker.exists()


def test_torch_files_of_something_else(copies: dict[str, Path]) -> None:
    file = copies["torch"] / "checkpoint-last.pth"
    for content, message in (
        ([1, 2], "holds no dict of tensors"),
        ({}, "holds no dict of tensors"),
        ({"model": {}}, "holds no dict of tensors"),
        ({"model": {"mask_token": 3}}, "holds 'mask_token', which is no tensor"),
        ({"state_dict": torch.ones(3)}, "holds no dict of tensors"),
    ):
        torch.save(content, file)
        refused(copies["torch"], message)
    file.write_bytes(b"\xff" * 1000)
    refused(copies["torch"], "no torch file, or damaged")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("family", ["mar", "harmon"])
def test_wrong_configurations(copies: dict[str, Path], family: str) -> None:
    config = copies[family] / "config.json"
    content = json.loads(config.read_text())
    for changed, message in (
        ({"model_type": "stable_diffusion"}, r"family stable_diffusion is not supported.*config\.json: model_type"),
        ({"vision": {}}, "unknown key 'vision'"),
        ({"mar": content["mar"] | {"num_heads": 3}}, "unknown key 'num_heads'"),
        ({"vae": content["vae"] | {"attn_type": "x"}}, "unknown key 'attn_type'"),
        ({"mar": content["mar"] | {"encoder_num_heads": 3}}, "not divisible by 3 heads"),
        ({"mar": content["mar"] | {"vae_stride": 8}}, "has shape|parts do not fit"),
    ):
        config.write_text(json.dumps(content | changed))
        refused(copies[family], message)
    config.write_text(json.dumps(content)[:-5])
    refused(copies[family], "cannot be read")


def test_wrong_language_models(copies: dict[str, Path]) -> None:
    config = copies["harmon"] / "config.json"
    content = json.loads(config.read_text())
    for changed, message in (
        ({"model_type": "llama"}, "language model llama is not supported"),
        ({"hiden_size": 16}, r"unknown key 'hiden_size' .*config\.json: llm"),
        ({"num_experts": 16}, "unknown key 'num_experts'"),
        ({"use_sliding_window": True}, "sliding windows are not supported"),
    ):
        config.write_text(json.dumps(content | {"llm": content["llm"] | changed}))
        refused(copies["harmon"], message)
    # What older releases of transformers wrote is known.
    old = {"rope_theta": 10000.0, "torch_dtype": "bfloat16", "pruned_heads": {}, "top_k": 50, "_attn_x": None}
    config.write_text(json.dumps(content | {"llm": content["llm"] | old}))
    load_policy(copies["harmon"])


def test_a_family_for_another(copies: dict[str, Path]) -> None:
    shutil.copy(copies["harmon"] / "config.json", copies["mar"] / "config.json")
    refused(copies["mar"], "tensor llm.* missing")
    shutil.copy(copies["mar"] / "model.safetensors", copies["harmon"] / "model.safetensors")
    change(copies["harmon"] / "config.json", model_type="harmon")
    refused(copies["harmon"], "tensor llm.* missing")


def test_places_without_a_checkpoint(copies: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(folder, "no MAR or Harmon weights found")
    shutil.copy(copies["torch"] / "kl16.ckpt", folder)
    refused(folder, "no MAR or Harmon weights found.*autoencoder alone")
    for name in ("mar-base.safetensors", "mar-large.safetensors"):
        shutil.copy(copies["mar"] / "model.safetensors", folder / name)
    refused(folder, "several weights files: mar-base.safetensors, mar-large.safetensors")
    with pytest.raises(InputError, match=r"weights are in \.safetensors"):
        load_policy(copies["mar"] / "config.json")
    save_file({"video_encoder.norm.weight": torch.ones(2)}, folder / "nova.safetensors")
    with pytest.raises(InputError, match="a NOVA transformer alone"):
        load_policy(folder / "nova.safetensors")


def test_sizes_that_are_not_published_need_a_configuration(copies: dict[str, Path]) -> None:
    (copies["mar"] / "config.json").unlink()
    refused(copies["mar"], "none of the published mar_base, mar_large, mar_huge.*put the model's config.json beside it")


def test_the_same_tensor_twice(copies: dict[str, Path]) -> None:
    file = copies["mar"] / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"module.mar.mask_token": torch.ones(1, 1, 16)}, file)
    refused(copies["mar"], r"tensor (module\.)?mar\.mask_token is there twice")


def test_harmon_without_its_tokenizer(copies: dict[str, Path]) -> None:
    (copies["harmon"] / "tokenizer.json").unlink()
    refused(copies["harmon"], r"tokenizer\.json is missing")
    (copies["harmon"] / "tokenizer.json").write_text("{")
    refused(copies["harmon"], "tokenizer cannot be read")
