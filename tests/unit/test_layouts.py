"""MAR and Harmon checkpoints in every layout: what was written is what is read, to the bit."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mar_grpo.documents import Checkpoint, read_document
from mar_grpo.errors import InputError
from mar_grpo.models.checkpoint import fetch_checkpoint, folder_digest, load_policy, publish_checkpoint, save_policy
from mar_grpo.models.export import published_tensors
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.layouts import open_contents
from mar_grpo.models.policy import Policy
from mar_grpo.models.vae import mar_bytes
from mar_grpo.store import Store
from tests.unit import tiny_mar

MAKE = {"mar": tiny_mar.mar, "harmon": tiny_mar.harmon}


def flat(policy: Policy) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": value for part, named in published_tensors(policy).items() for name, value in named.items()
    }


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def configure(folder: Path, policy: Policy) -> None:
    """The files beside weights that hold no configuration."""
    extra = policy.transformer.config.to_dict()
    config = extra if "llm" in extra else {"model_type": "mar", "mar": extra}
    (folder / "config.json").write_text(json.dumps(config | {"vae": policy.vae.config}))
    if "llm" in extra:
        (folder / "tokenizer.json").write_text(policy.text.tokenizer.to_str())


@pytest.fixture(params=["mar", "harmon"])
def policy(request: pytest.FixtureRequest) -> Policy:
    made: Policy = MAKE[request.param]()
    return made


# --- what we write -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["ours", "published"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_round_trip_to_the_bit(policy: Policy, tmp_path: Path, layout: Any, dtype: torch.dtype | None) -> None:
    exact = {name: value.to(dtype) for name, value in flat(policy).items()}
    folder = save_policy(policy, tmp_path / "one", layout=layout, dtype=dtype)
    loaded = load_policy(folder, dtype=None)
    assert same(flat(loaded), exact) and not loaded.training
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in policy.parameters()]
    assert loaded.transformer.config == policy.transformer.config
    other: Any = "ours" if layout == "published" else "published"
    assert same(flat(load_policy(save_policy(loaded, tmp_path / "two", layout=other), dtype=None)), exact)
    assert all(value.dtype == torch.float32 for value in flat(load_policy(folder)).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_files_of_the_published_layouts(tmp_path: Path) -> None:
    names = {"a dog": 3}
    mar = save_policy(tiny_mar.mar(class_names=names), tmp_path / "mar", layout="published")
    assert sorted(p.name for p in mar.iterdir()) == ["checkpoint-last.pth", "classes.json", "config.json", "kl16.ckpt"]
    content = torch.load(mar / "checkpoint-last.pth", weights_only=True)
    assert content.keys() == {"model", "model_ema"}
    assert "diffloss.net.input_proj.weight" in content["model"] and "class_emb.weight" in content["model_ema"]
    assert "encoder.down.0.block.0.norm1.weight" in torch.load(mar / "kl16.ckpt", weights_only=True)["model"]
    assert load_policy(mar).class_names == names

    folder = save_policy(tiny_mar.harmon(), tmp_path / "harmon", layout="published")
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["model_type"] == "harmon"
    prefixes = {name.split(".")[0] for name in load_file(folder / "model.safetensors")}
    assert prefixes == {"vae", "llm", "mar", "proj_in", "proj_out"}


def test_a_torch_file_alone(policy: Policy, tmp_path: Path) -> None:
    file = save_policy(policy, tmp_path / "model.pth")
    content = torch.load(file, weights_only=True)
    assert not any(name.startswith("vae.") for name in content)
    configure(tmp_path, policy)
    save_file({k: v.contiguous() for k, v in published_tensors(policy)["vae"].items()}, tmp_path / "kl16.safetensors")
    assert same(flat(load_policy(file)), flat(policy))


@pytest.mark.parametrize("layout", ["ours", "published"])
def test_weights_are_the_mapped_file(tmp_path: Path, layout: Any) -> None:
    """No copy is made where none is needed; and writing to a parameter leaves the file as it is."""
    folder = save_policy(tiny_mar.mar(), tmp_path / "one", layout=layout)
    before = folder_digest(folder)
    loaded = load_policy(folder)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in mapped]
    for parameter in loaded.parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in spans)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(1.0)
    assert folder_digest(folder) == before


def test_the_same_pictures(policy: Policy, tmp_path: Path) -> None:
    loaded = load_policy(save_policy(policy, tmp_path / "one"))
    tokens = torch.randn(2, policy.num_tokens, policy.token_dim, generator=torch.Generator().manual_seed(0))
    known = torch.arange(policy.num_tokens).expand(2, -1) < 3
    with torch.no_grad():
        prompts = ["1", "2"] if isinstance(policy, type(tiny_mar.mar())) else ["a red apple", "a dog"]
        first, second = (each.condition(each.encode_prompts(prompts)) for each in (policy, loaded))
        ours, theirs = policy.ar_latents(tokens, known, first), loaded.ar_latents(tokens, known, second)
        torch.testing.assert_close(theirs, ours)  # mapped weights lie at another alignment, and kernels round by it
        shown = loaded.decode(tokens).int() - policy.decode(tokens).int()
        assert shown.abs().max() <= 1


# --- what others write -------------------------------------------------------------------------------------------


def shards(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    places = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


@pytest.mark.parametrize("form", ["safetensors", "index", "model", "model_ema", "state_dict", "flat", "old torch"])
def test_forms_of_a_file(policy: Policy, tmp_path: Path, form: str) -> None:
    configure(tmp_path, policy)
    prefix = "module." if form in ("model_ema", "index") else ""
    tensors = {prefix + name: value.contiguous() for name, value in flat(policy).items()}
    wrong = {name: torch.zeros_like(value) for name, value in tensors.items()}
    file = tmp_path / "weights.pth"
    if form == "safetensors":
        file = tmp_path / "model.safetensors"
        save_file(tensors, file)
    elif form == "index":
        file = shards(tensors, tmp_path)
    elif form == "model_ema":
        # As MAR's own training leaves it: with optimizer, scaler and the parsed arguments.
        more = {"optimizer": {"state": {}}, "epoch": 3, "scaler": {}, "args": argparse.Namespace(model="mar_base")}
        torch.save({"model": wrong, "model_ema": tensors} | more, file)
    elif form in ("model", "state_dict"):
        torch.save({form: tensors, "epoch": 1}, file)
    else:
        torch.save(tensors, file, _use_new_zipfile_serialization=form == "flat")
    assert same(flat(load_policy(file if form == "flat" else tmp_path)), flat(policy))


@pytest.mark.parametrize("autoencoder", ["kl16.ckpt", "kl16.safetensors", "vae.pth"])
def test_the_autoencoder_beside_or_elsewhere(tmp_path: Path, autoencoder: str) -> None:
    policy = tiny_mar.mar()
    configure(tmp_path, policy)
    parts = published_tensors(policy)
    save_file(parts["mar"], tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="autoencoder's weights are missing") as caught:
        load_policy(tmp_path)
    assert "kl16.ckpt" in str(caught.value)
    place = tmp_path / "other" / autoencoder
    place.parent.mkdir()
    if autoencoder.endswith(".safetensors"):
        save_file({name: value.contiguous() for name, value in parts["vae"].items()}, place)
    else:  # latent diffusion's own file holds parts of its training as well
        torch.save({"state_dict": parts["vae"] | {"loss.logvar": torch.ones(1)}}, place)
    assert same(flat(load_policy(tmp_path, others=[place])), flat(policy))
    assert same(flat(load_policy(tmp_path / "x.safetensors", others=[place.parent])), flat(policy))
    shutil.move(place, tmp_path / autoencoder)
    assert same(flat(load_policy(tmp_path)), flat(policy))


@pytest.mark.parametrize("prefix", ["", "mar.", "module.", "module.mar."])
def test_a_fine_tuned_mar_in_its_harmon(tmp_path: Path, prefix: str) -> None:
    base, tuned = tiny_mar.harmon(0), tiny_mar.harmon(1)
    folder = save_policy(base, tmp_path / "base")
    file = tmp_path / "tuned" / "model.safetensors"
    file.parent.mkdir()
    save_file({prefix + name: value for name, value in tuned.transformer.mar.state_dict().items()}, file)
    loaded = load_policy(file.parent, others=[folder])
    for part, named in published_tensors(loaded).items():
        assert same(named, published_tensors(tuned if part == "mar" else base)[part])


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_head(tmp_path: Path, tied: bool) -> None:
    policy = tiny_mar.harmon()
    folder = save_policy(policy, tmp_path / "one")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["llm.model.embed_tokens.weight"].clone()
    tensors["llm.lm_head.weight"] = head if tied else head + 1
    save_file(tensors, folder / "model.safetensors")
    if tied:
        assert same(flat(load_policy(folder)), flat(policy))
    else:
        with pytest.raises(InputError, match=r"tensor llm\.lm_head\.weight is not tied"):
            load_policy(folder)


def test_a_mar_configuration_with_nothing_around_it(tmp_path: Path) -> None:
    policy = tiny_mar.mar()
    folder = save_policy(policy, tmp_path / "one")
    (folder / "config.json").write_text(json.dumps(tiny_mar.MAR))
    assert same(flat(load_policy(folder)), flat(policy))  # the autoencoder's sizes follow from its tensors


@pytest.mark.parametrize("family", ["mar", "harmon"])
def test_recorded_weights_load_as_a_checkpoint(tmp_path: Path, family: str) -> None:
    """The conformance sets' own files (published names, 8 and 16 bits), with an autoencoder made for them beside."""
    golden = Path(__file__).parents[1] / "golden" / family / "a"
    shutil.copy(golden / "weights.safetensors", tmp_path)
    manifest = json.loads((golden / "manifest.json").read_text())
    config = manifest.get("config")
    if family == "harmon":  # its type stands for other sizes than those recorded beside it
        mar = {
            key: value for key, value in (manifest["mar"] | manifest["mar_arch"]).items() if key not in ("type", "note")
        }
        config = {"model_type": "harmon", "llm": manifest["llm"], "mar": mar}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(tiny_mar.tokenizer().to_str())
    vae = Kl16(Kl16Config(ch=32, ch_mult=(1,) * 5, num_res_blocks=1), mar_bytes, torch.Generator().manual_seed(0))
    save_file(
        {name: value.contiguous() for name, value in vae.published_state().items()}, tmp_path / "kl16.safetensors"
    )
    expected = load_file(golden / "weights.safetensors")
    found = {name: value for name, value in flat(load_policy(tmp_path)).items() if not name.startswith("vae.")}
    prefix = "" if family == "harmon" else "mar."
    assert same(found, {prefix + name: value.float() for name, value in expected.items()})


def test_layouts_say_what_they_are(tmp_path: Path) -> None:
    folder = save_policy(tiny_mar.mar(), tmp_path / "mar", layout="published")
    contents = open_contents(folder)
    assert contents.layout == "checkpoint-last.pth, tensors of 'model_ema', kl16.ckpt beside it"
    assert contents.family == "mar"
    assert open_contents(save_policy(tiny_mar.harmon(), tmp_path / "harmon")).family == "harmon"


# --- stores ------------------------------------------------------------------------------------------------------


def test_publish_and_fetch(policy: Policy, file_store: Store, tmp_path: Path) -> None:
    folder = save_policy(policy, tmp_path / "one")
    reference = publish_checkpoint(folder, file_store, "a", step=3)
    document = read_document(reference, Checkpoint)
    assert document.family == ("harmon" if "llm" in document.config else "mar")
    fetched = fetch_checkpoint(reference, tmp_path / "cache")
    assert folder_digest(fetched) == folder_digest(folder)
    assert same(flat(load_policy(fetched)), flat(policy))


def test_one_file_of_a_store_with_what_lies_beside_it(policy: Policy, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    file = save_policy(policy, folder / "weights.pth")
    configure(folder, policy)
    torch.save({"model": dict(published_tensors(policy)["vae"])}, folder / "kl16.ckpt")
    (folder / "other.pth").write_bytes(b"not fetched")
    store.put_folder(folder, "models")
    fetched = fetch_checkpoint(store.uri("models/weights.pth"), tmp_path / "cache")
    assert fetched.name == "weights.pth" and fetched.read_bytes() == file.read_bytes()
    assert same(flat(load_policy(fetched)), flat(policy))
    with pytest.raises(InputError, match=r"has digest .*, 0000"):
        fetch_checkpoint(store.uri("models/weights.pth"), tmp_path / "cache", sha256="0" * 64)
    with pytest.raises(InputError, match="does not exist"):
        fetch_checkpoint(store.uri("models/none.pth"), tmp_path / "cache")
