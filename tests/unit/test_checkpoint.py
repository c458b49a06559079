"""Checkpoint folders: what is written is what is read, published variants load, and nothing wrong gets through."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import load_file, save_file
from transformers import PhiModel, PreTrainedTokenizerFast

from mar_grpo.documents import Checkpoint, CheckpointFile, DocumentRef, read_document, write_document
from mar_grpo.errors import InputError, RetryableError, UnhealthyError
from mar_grpo.models.checkpoint import fetch_checkpoint, folder_digest, load_policy, publish_checkpoint, save_policy
from mar_grpo.store import Store
from tests.unit import tiny

WEIGHTS = "diffusion_pytorch_model.safetensors"
HEAD = "image_decoder.head.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tiny.policy(), tmp_path_factory.mktemp("saved") / "policy")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# --- round trips -------------------------------------------------------------------------------------------------


def test_layout(saved: Path) -> None:
    assert sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()) == [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "transformer/config.json",
        f"transformer/{WEIGHTS}",
        "vae/config.json",
        f"vae/{WEIGHTS}",
    ]
    index = json.loads((saved / "model_index.json").read_text())
    assert index["_class_name"] == "NOVAPipeline"
    assert index["transformer"][1] == "NOVATransformer3DModel"


def test_round_trip_is_exact_and_deterministic(saved: Path, tmp_path: Path) -> None:
    policy, loaded = tiny.policy(), load_policy(saved)
    ours, theirs = policy.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not loaded.training
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in policy.parameters()]
    # close, not equal: the loaded weights lie mapped at another alignment, and kernels round by alignment
    torch.testing.assert_close(
        policy.condition(policy.encode_prompts(["a dog"])), loaded.condition(loaded.encode_prompts(["a dog"]))
    )
    assert folder_digest(save_policy(loaded, tmp_path / "again")) == folder_digest(saved)


def test_diffusers_and_transformers_read_their_parts(saved: Path) -> None:
    policy = tiny.policy()
    vae = AutoencoderKL.from_pretrained(saved / "vae")
    text = PhiModel.from_pretrained(saved / "text_encoder")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved / "tokenizer")
    for theirs, ours in ((vae, policy.vae.model), (text, policy.text.model)):
        expected = ours.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in theirs.state_dict().items())
    assert vae.config["scaling_factor"] == 0.5
    prompt = "a photo of two zebras"
    assert tokenizer(prompt).input_ids == policy.text.token_ids(prompt) == [2, 12, 11, 15, 1]
    assert tokenizer.unk_token == "<unk>" and tokenizer.pad_token == "<pad>"


def test_half_precision_storage(saved: Path, tmp_path: Path) -> None:
    half = save_policy(tiny.policy(), tmp_path / "half", dtype=torch.float16)
    assert (half / "vae" / WEIGHTS).stat().st_size < 0.8 * (saved / "vae" / WEIGHTS).stat().st_size
    exact, loaded = tiny.policy().state_dict(), load_policy(half).state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert all(torch.equal(exact[name].half().float(), loaded[name]) for name in exact)


def test_saving_replaces_an_older_checkpoint(folder: Path) -> None:
    (folder / "left_over.json").write_text("{}")
    save_policy(tiny.policy(seed=1), folder)
    new, loaded = tiny.policy(seed=1).text.state_dict(), load_policy(folder).text.state_dict()
    assert all(torch.equal(new[name], loaded[name]) for name in new)
    assert not (folder / "left_over.json").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_other_schedulers_survive(tmp_path: Path) -> None:
    scheduler = {"_class_name": "DDPMScheduler", "num_train_timesteps": 1000, "beta_schedule": "scaled_linear"}
    loaded = load_policy(save_policy(tiny.policy(scheduler=scheduler), tmp_path / "ddpm"))
    assert loaded.scheduler_config == scheduler
    assert loaded.schedule(10).num_steps == 10


# --- published variants ------------------------------------------------------------------------------------------


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    marker = folder / "executed"
    for name in ("transformer", "vae", "text_encoder"):
        (folder / name / f"__{name}__.py").write_text(f"open({str(marker)!r}, 'w')\n")
        (folder / name / "__init__.py").write_text(f"open({str(marker)!r}, 'w')\n")
    change_json(
        folder / "text_encoder/config.json",
        lambda c: c.update(architectures=["PhiEncoderModel"], auto_map={"AutoModel": "__text_encoder__.Encoder"}),
    )
    load_policy(folder)
    assert not marker.exists()


def test_sharded_text_encoder_with_language_head(folder: Path) -> None:
    whole = folder / "text_encoder/model.safetensors"
    tensors = {f"model.{name}": tensor for name, tensor in load_file(whole).items()}
    whole.unlink()
    tensors["lm_head.weight"] = torch.zeros(20, 16)
    names = sorted(tensors)
    places: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name].half() for name in part}, whole.with_name(shard))
        places |= dict.fromkeys(part, shard)
    index = whole.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    expected = tiny.policy().text.state_dict()
    loaded = load_policy(folder).text.state_dict()
    assert all(torch.equal(expected[name].half().float(), loaded[name]) for name in expected)

    change_json(index, lambda c: c["weight_map"].update({"model.extra": "model-00001-of-00002.safetensors"}))
    with pytest.raises(InputError, match=r"tensor model\.extra is missing .*model-00001-of-00002"):
        load_policy(folder)
    change_json(index, lambda c: c["weight_map"].update({"model.extra": "../vae/x.safetensors"}))
    with pytest.raises(InputError, match=r"outside its folder: \.\./vae"):
        load_policy(folder)


def test_old_names_of_autoencoder_attention(folder: Path) -> None:
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".attentions." in name]:
            for new, former in old.items():
                if f".{new}." in name:
                    tensor = tensors.pop(name)
                    kernel = tensor[:, :, None, None].contiguous() if tensor.ndim == 2 else tensor
                    tensors[name.replace(new, former)] = kernel

    change_tensors(folder / "vae" / WEIGHTS, age)
    assert "encoder.mid_block.attentions.0.query.weight" in load_file(folder / "vae" / WEIGHTS)
    expected, loaded = tiny.policy().vae.state_dict(), load_policy(folder).vae.state_dict()
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


# --- input that is refused ---------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


T = f"transformer/{WEIGHTS}"
BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no index": ("model_index.json", Path.unlink, "file is missing"),
    "index is no JSON": ("model_index.json", lambda p: p.write_text('{"_class'), "cannot be read"),
    "index is no UTF-8": ("model_index.json", lambda p: p.write_bytes(b'{"a": "\xff"}'), "cannot be read"),
    "index is a list": ("model_index.json", lambda p: p.write_text("[]"), "must hold a JSON object"),
    "other family": (
        "model_index.json",
        lambda p: change_json(p, lambda c: c.update(_class_name="StableDiffusionPipeline")),
        "family StableDiffusionPipeline is not supported, NOVAPipeline is",
    ),
    "other transformer": (
        "transformer/config.json",
        lambda p: change_json(p, lambda c: c.update(_class_name="UNet")),
        "_class_name is 'UNet'",
    ),
    "unknown key": ("transformer/config.json", lambda p: change_json(p, lambda c: c.update(qk_norm=True)), "'qk_norm'"),
    "unknown key of the text encoder": (
        "text_encoder/config.json",
        lambda p: change_json(p, lambda c: c.update(hiden_size=16)),
        "unknown key 'hiden_size'",
    ),
    "no weights": (T, Path.unlink, "file is missing"),
    "cut weights": (T, cut, "cut or damaged"),
    "empty weights": (T, lambda p: p.write_bytes(b""), "cut or damaged"),
    "garbage weights": (T, lambda p: p.write_bytes(b"\xff" * 5000), "cut or damaged"),
    "missing tensor": (T, lambda p: change_tensors(p, lambda t: t.pop(HEAD)), f"tensor {HEAD} missing"),
    "unexpected tensor": (T, lambda p: change_tensors(p, lambda t: t.update(x=torch.ones(1))), "unexpected tensor x "),
    "wrong shape": (
        T,
        lambda p: change_tensors(p, lambda t: t.update({HEAD: torch.ones(16, 8)})),
        rf"tensor {HEAD} has shape \[16, 8\], config.json asks for \[16, 16\]",
    ),
    "not finite": (T, lambda p: change_tensors(p, lambda t: t[HEAD][0].fill_(float("nan"))), f"tensor {HEAD} .*finite"),
    "integers": (T, lambda p: change_tensors(p, lambda t: t.update({HEAD: t[HEAD].int()})), f"tensor {HEAD} .*finite"),
    "tokenizer": ("tokenizer/tokenizer.json", cut, "tokenizer cannot be read"),
    "no tokenizer": ("tokenizer/tokenizer.json", Path.unlink, "file is missing"),
    "scheduler": (
        "scheduler/scheduler_config.json",
        lambda p: change_json(p, lambda c: c.update(use_karras_sigmas=True)),
        "use_karras_sigmas",
    ),
    "parts differ": (
        "vae/config.json",
        lambda p: change_json(p, lambda c: c.update(latent_channels=8)),
        "image_dim against vae latent_channels, 4 != 8",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(folder: Path, case: str) -> None:
    file, damage, message = BAD[case]
    damage(folder / file)
    with pytest.raises(InputError, match=message) as caught:
        load_policy(folder)
    assert caught.value.exit_code == 2
    shown = str(caught.value)
    assert Path(file).name in shown or str((folder / file).parent) in shown or case == "parts differ"


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"checkpoint does not exist .*nowhere"):
        load_policy(tmp_path / "nowhere")


# --- saving that fails -------------------------------------------------------------------------------------------


def test_an_unhealthy_policy_is_not_saved(folder: Path) -> None:
    before = folder_digest(folder)
    policy = tiny.policy()
    with torch.no_grad():
        policy.transformer.get_parameter(HEAD)[0, 0] = float("inf")
    with pytest.raises(UnhealthyError, match=f"transformer: {HEAD} is not finite") as caught:
        save_policy(policy, folder)
    assert caught.value.exit_code == 3
    assert folder_digest(folder) == before and len(list(folder.parent.iterdir())) == 1


def test_values_out_of_range_of_float16_are_not_saved(tmp_path: Path) -> None:
    policy = tiny.policy()
    with torch.no_grad():
        policy.transformer.get_parameter(HEAD)[0, 0] = 1e6
    with pytest.raises(InputError, match=f"{HEAD} is out of range of torch.float16"):
        save_policy(policy, tmp_path / "half", dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def test_no_room_on_the_disk(folder: Path) -> None:
    """A file-size limit of the operating system stands for a full disk: the same write fails half-way."""
    before, policy = folder_digest(folder), tiny.policy()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RetryableError, match=r"no room to write: .*checkpoint") as caught:
            save_policy(policy, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.exit_code == 75
    assert folder_digest(folder) == before and len(list(folder.parent.iterdir())) == 1


# --- store -------------------------------------------------------------------------------------------------------


def test_publish_and_fetch(saved: Path, store: Store, tmp_path: Path) -> None:
    parent = "0" * 64
    reference = publish_checkpoint(saved, store, "runs/one/checkpoint", step=7, parent=parent, recipe_digest="r")
    document = read_document(reference, Checkpoint)
    assert (document.step, document.parent, document.recipe_digest) == (7, parent, "r")
    assert document.config["transformer"]["arch"] == tiny.TRANSFORMER["arch"]
    assert len(document.files) == 10 and reference.sha256 == document.digest

    fetched = fetch_checkpoint(reference, tmp_path / "cache")
    assert folder_digest(fetched) == folder_digest(saved)
    for same in (store.uri("runs/one/checkpoint"), reference.uri, store.uri("runs/one/checkpoint") + "/"):
        assert fetch_checkpoint(same, tmp_path / "cache", sha256=reference.sha256) == fetched

    for file in document.files:
        store.delete(store.key(file.uri))
    assert fetch_checkpoint(reference, tmp_path / "cache") == fetched  # nothing is fetched twice
    (fetched / "model_index.json").write_text("{}")
    with pytest.raises(InputError, match=r"the (object|file) does not exist"):
        fetch_checkpoint(reference, tmp_path / "cache")  # ... unless it was damaged


def test_a_plain_folder_in_a_store(saved: Path, store: Store, tmp_path: Path) -> None:
    store.put_folder(saved, "model")
    digest = folder_digest(saved)
    assert folder_digest(fetch_checkpoint(store.uri("model"), tmp_path / "cache", sha256=digest)) == digest
    store.write_bytes("model/model_index.json", b"{}")
    with pytest.raises(InputError, match=f"checkpoint has digest .*, {digest} was asked for"):
        fetch_checkpoint(store.uri("model"), tmp_path / "cache", sha256=digest)
    with pytest.raises(InputError, match="does not exist"):
        fetch_checkpoint(store.uri("nothing"), tmp_path / "cache")


def test_code_and_documents_stay_behind(folder: Path, file_store: Store, tmp_path: Path) -> None:
    digest = folder_digest(folder)
    (folder / "transformer/__transformer__.py").write_text("raise SystemExit\n")
    publish_checkpoint(folder, file_store, "a")
    fetched = fetch_checkpoint(file_store.uri("a"), tmp_path / "cache")
    publish_checkpoint(Path(file_store.root) / "a", file_store, "b")
    again = read_document(file_store.uri("b/checkpoint.json"), Checkpoint)
    assert folder_digest(folder) == folder_digest(fetched) == digest
    assert "checkpoint.json" not in [file.path for file in again.files]


def test_a_damaged_object_is_refused(saved: Path, file_store: Store, tmp_path: Path) -> None:
    reference = publish_checkpoint(saved, file_store, "a")
    data = bytearray(file_store.read_bytes(f"a/{T}"))
    data[-1] ^= 1
    file_store.write_bytes(f"a/{T}", bytes(data))
    with pytest.raises(InputError, match=WEIGHTS) as caught:
        fetch_checkpoint(reference, tmp_path / "cache")
    assert caught.value.exit_code == 2
    assert not list((tmp_path / "cache").iterdir())


def test_a_document_cannot_reach_outside(saved: Path, file_store: Store, tmp_path: Path) -> None:
    entry = file_store.put_file(saved / "model_index.json", "x")
    file = CheckpointFile(path="../escaped", uri=entry.uri, bytes=entry.bytes, sha256=entry.sha256)
    document = Checkpoint(family="NOVAPipeline", config={}, files=(file,), step=0)
    with pytest.raises(InputError, match=r"outside its folder: '\.\./escaped'"):
        fetch_checkpoint(write_document(file_store, "bad.json", document), tmp_path / "cache")


def test_package_checkpoints(tmp_path: Path) -> None:
    assert fetch_checkpoint("package://fluent_emoji_flat", tmp_path).name == "fluent_emoji_flat"
    with pytest.raises(InputError, match=r"folder does not exist \(package://nothing\)"):
        fetch_checkpoint("package://nothing", tmp_path)


def test_an_incomplete_folder_is_not_published(folder: Path, file_store: Store) -> None:
    (folder / "vae/config.json").unlink()
    with pytest.raises(InputError, match=r"checkpoint file is missing .*vae/config.json"):
        publish_checkpoint(folder, file_store, "a")
    assert not file_store.exists("a/checkpoint.json")


def test_wrong_document(file_store: Store, tmp_path: Path) -> None:
    entry = file_store.write_json("other.json", {"document": "prompt_set"})
    with pytest.raises(InputError, match="not a checkpoint"):
        fetch_checkpoint(entry.uri, tmp_path)
    with pytest.raises(InputError, match="sha256"):
        fetch_checkpoint(DocumentRef(uri=entry.uri, sha256="0" * 64), tmp_path)
