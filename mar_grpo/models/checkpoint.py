"""Checkpoints in the published NOVA folder layout: JSON and safetensors in, the same out, nothing executed.

    model_index.json
    transformer/{config.json, diffusion_pytorch_model.safetensors}
    vae/{config.json, diffusion_pytorch_model.safetensors}
    text_encoder/{config.json, model.safetensors}
    tokenizer/{tokenizer.json, tokenizer_config.json}
    scheduler/scheduler_config.json

Weights may be sharded (`*.safetensors.index.json`) and stored in 16 bits; they are float32 in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from mar_grpo.documents import Checkpoint, CheckpointFile, DocumentRef, read_document, write_document
from mar_grpo.errors import InputError, UnhealthyError
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.text import PAD, UNKNOWN
from mar_grpo.store import Store, canonical_json, store_for
from mar_grpo.transports import explain_local

FAMILY = "NOVAPipeline"
DOCUMENT = "checkpoint.json"  # the Checkpoint document beside the published files
PLAIN_SUFFIXES = (".json", ".safetensors", ".txt")  # what a checkpoint is made of; code in its folder stays behind
DIFFUSERS_STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


# --- load --------------------------------------------------------------------------------------------------------


def load_policy(folder: str | os.PathLike[str]) -> NovaPolicy:
    """The policy of a published or saved folder, float32 on the CPU, in eval mode.

    Raises:
        InputError: a file is missing, cut or not what it should be; another family; a tensor is missing, unexpected, of
            another shape or not finite. The message names the file and the tensor.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError("checkpoint folder does not exist", where=str(folder))
    index = folder / "model_index.json"
    family = read_config(index).get("_class_name")
    if family != FAMILY:
        raise InputError(f"checkpoint family {family} is not supported, {FAMILY} is", where=f"{index}: _class_name")
    policy = NovaPolicy.from_configs(
        read_config(folder / "transformer/config.json"),
        read_config(folder / "vae/config.json"),
        read_config(folder / "text_encoder/config.json"),
        _read_tokenizer(folder / "tokenizer/tokenizer.json"),
        read_config(folder / "scheduler/scheduler_config.json"),
    )
    _load_weights(policy.transformer, folder / "transformer", DIFFUSERS_STEM)
    _load_weights(policy.vae.model, folder / "vae", DIFFUSERS_STEM, _current_vae_form)
    _load_weights(policy.text.model, folder / "text_encoder", TRANSFORMERS_STEM, _decoder_form)
    return policy.eval()


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InputError: no such file, not JSON, not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("checkpoint file is missing", where=str(path)) from None
    except (ValueError, OSError) as error:
        raise InputError(f"checkpoint file cannot be read: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise InputError("checkpoint file must hold a JSON object", where=str(path))
    return content


def read_tensors(folder: Path, stem: str) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, name, tensor) of STEM.safetensors, or of every shard that STEM.safetensors.index.json lists.

    Raises:
        InputError: a file is missing, cut or no safetensors; a shard lacks a tensor that the index promises.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.exists() or not index.exists():
        for name, tensor in _read_shard(single).items():
            yield single, name, tensor
        return
    places = read_config(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise InputError("index has no weight_map of tensor names to files", where=str(index))
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard:
            raise InputError(f"index names a file outside its folder: {shard}", where=str(index))
        tensors = _read_shard(folder / shard)
        for name in (name for name, place in places.items() if place == shard):
            if name not in tensors:
                raise InputError(f"tensor {name} is missing", where=str(folder / shard))
            yield folder / shard, name, tensors[name]


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError("checkpoint file is missing", where=str(path)) from None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        hint = "fetch the file again"
        raise InputError(f"weights are cut or damaged: {error}", where=str(path), hint=hint) from error


Form = Callable[[str, Tensor], tuple[str, Tensor] | None]


def _load_weights(module: nn.Module, folder: Path, stem: str, form: Form | None = None) -> None:
    """Give `module` the tensors of a folder; `form` turns a stored (name, tensor) into ours, None: it is not for us."""
    wanted = module.state_dict()
    found: dict[str, Tensor] = {}
    for path, stored, tensor in read_tensors(folder, stem):
        ours = form(stored, tensor) if form else (stored, tensor)
        if ours is None:
            continue
        name, tensor = ours
        if name not in wanted:
            raise InputError(f"unexpected tensor {stored}", where=str(path), hint="does config.json belong to it?")
        if tensor.shape != wanted[name].shape:
            what = f"tensor {stored} has shape {list(tensor.shape)}, config.json asks for {list(wanted[name].shape)}"
            raise InputError(what, where=str(path))
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise InputError(f"tensor {stored} holds values that are not finite numbers", where=str(path))
        found[name] = tensor.float()
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"tensor {missing[0]}{more} missing", where=str(folder))
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    module.load_state_dict(found, assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name])


def _decoder_form(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """PhiModel's form of a tensor stored with the language head (`model.` in front of names, `lm_head` beside)."""
    return None if name.startswith("lm_head.") else (name.removeprefix("model."), tensor)


def _current_vae_form(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Today's form of an attention projection: published Stable Diffusion files have other names, some 1x1 kernels."""
    found = re.fullmatch(r"(.*\.attentions\.\d+\.)(query|key|value|proj_attn)(\.weight|\.bias)", name)
    if not found:
        return name, tensor
    return found[1] + _OLD_ATTENTION[found[2]] + found[3], tensor.flatten(1) if tensor.ndim == 4 else tensor


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise InputError("checkpoint file is missing", where=str(path))
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"tokenizer cannot be read: {error}", where=str(path)) from error


# --- save --------------------------------------------------------------------------------------------------------


def save_policy(policy: NovaPolicy, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a policy in the published layout; the folder appears complete or not at all, and replaces an older one.

    Args:
        dtype: storage of all weights; float16 halves the size and is float32 again after loading.

    Raises:
        UnhealthyError: a weight is not finite.
        InputError: a weight is out of range of `dtype`.
        RetryableError: the disk is full.
    """
    folder = Path(folder).absolute()
    scheduler = policy.scheduler_config.get("_class_name", "FlowMatchEulerDiscreteScheduler")
    index = {
        "_class_name": FAMILY,
        "scheduler": ["diffusers", scheduler],
        "text_encoder": ["transformers", "PhiModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["__transformer__", "NOVATransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    special = {"pad_token": PAD, "unk_token": UNKNOWN}
    vocabulary = policy.text.tokenizer.get_vocab()
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"} | {
        key: token for key, token in special.items() if token in vocabulary
    }
    with _whole_folder(folder, replace=True) as partial:
        _write_json(partial / "model_index.json", index)
        _write_json(partial / "scheduler/scheduler_config.json", policy.scheduler_config)
        _write_json(partial / "tokenizer/tokenizer_config.json", tokenizer_config)
        (partial / "tokenizer/tokenizer.json").write_text(policy.text.tokenizer.to_str(pretty=True), encoding="utf-8")
        for name, stem, module, config in (
            ("transformer", DIFFUSERS_STEM, policy.transformer, policy.transformer.config.to_dict()),
            ("vae", DIFFUSERS_STEM, policy.vae.model, policy.vae.config),
            ("text_encoder", TRANSFORMERS_STEM, policy.text.model, policy.text.config),
        ):
            _write_json(partial / name / "config.json", config)
            tensors = {key: _stored(f"{name}: {key}", value, dtype) for key, value in module.state_dict().items()}
            weights = partial / name / f"{stem}.safetensors"
            save_file(tensors, weights, metadata={"format": "pt"})
            shutil.copymode(partial / "model_index.json", weights)  # safetensors makes files only their owner can read
    return folder


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise UnhealthyError(f"tensor {name} is not finite, the checkpoint is not written")
    stored = tensor.detach().to("cpu", dtype).contiguous()
    if not torch.isfinite(stored).all():
        raise InputError(f"tensor {name} is out of range of {dtype}", hint="store float32")
    return stored


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _whole_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and vanishes when not.

    With `replace` False a folder that somebody else put there meanwhile stays.
    """
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    old = partial.with_name(partial.name + ".old")
    try:
        partial.mkdir(parents=True)
        yield partial
        if replace and folder.exists():
            folder.rename(old)
        try:
            partial.rename(folder)
        except OSError:
            if replace or not folder.is_dir():
                raise
    except OSError as error:
        raise explain_local("write", str(folder), error) from error
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise explain_local("write", str(folder), OSError(int(code[1]), os.strerror(int(code[1])))) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


# --- store -------------------------------------------------------------------------------------------------------


def publish_checkpoint(
    folder: str | os.PathLike[str],
    store: Store,
    prefix: str,
    *,
    step: int = 0,
    parent: str | None = None,
    recipe_digest: str | None = None,
) -> DocumentRef:
    """Put a checkpoint folder into the store and, last, the Checkpoint document that names every file and digest.

    Args:
        prefix: key of the folder; the document is `prefix/checkpoint.json`.
        step: updates that made it; `parent`: digest of the checkpoint it was trained from.
    """
    folder = Path(folder)
    read_config(folder / "model_index.json")
    files = []
    for path in _plain_files(folder):
        entry = store.put_file(folder / path, f"{prefix}/{path}")
        files.append(CheckpointFile(path=path, uri=entry.uri, bytes=entry.bytes, sha256=entry.sha256))
    names = ("transformer", "vae", "text_encoder")
    config = {name: read_config(folder / name / "config.json") for name in names}
    config["scheduler"] = read_config(folder / "scheduler/scheduler_config.json")
    document = Checkpoint(
        family=FAMILY, config=config, files=tuple(files), step=step, parent=parent, recipe_digest=recipe_digest
    )
    return write_document(store, f"{prefix}/{DOCUMENT}", document)


def fetch_checkpoint(source: DocumentRef | str, cache: str | os.PathLike[str], *, sha256: str | None = None) -> Path:
    """A local folder that holds the checkpoint, every byte checked against the digests that are known.

    Args:
        source: a reference or URI of a Checkpoint document; or `package://NAME` (shipped with this package), a path or
            URI of a folder. A folder with a document beside its files is read through the document.
        cache: local folder for what comes from a store; what lies there already and is right is not fetched again.
        sha256: digest of the document, or `folder_digest` of a folder without one.

    Raises:
        InputError: no such checkpoint, or a digest is wrong.
    """
    uri, pin = (source.uri, source.sha256) if isinstance(source, DocumentRef) else (source.rstrip("/"), sha256)
    cache = Path(cache)
    if uri.startswith("package://"):
        folder = Path(str(resources.files("mar_grpo.assets") / uri.removeprefix("package://")))
    else:
        store, key = store_for(uri)
        if key.endswith(".json") or store.exists(f"{key}/{DOCUMENT}"):
            return _fetch_document(uri if key.endswith(".json") else f"{uri}/{DOCUMENT}", pin, cache)
        folder = Path("/", store.root, key)
        if store.scheme != "file":
            version = canonical_json([(uri, name, *store.stat(name)) for name in store.list(key)])
            folder = cache / hashlib.sha256(version).hexdigest()[:16]
            if not folder.is_dir():
                with _whole_folder(folder, replace=False) as partial:
                    store.get_folder(key, partial)
    if not folder.is_dir():
        raise InputError("checkpoint folder does not exist", where=uri)
    if pin is not None and folder_digest(folder) != pin:
        what = f"checkpoint has digest {folder_digest(folder)}, {pin} was asked for"
        raise InputError(what, where=uri, hint="correct the digest or the URI")
    return folder


def folder_digest(folder: str | os.PathLike[str]) -> str:
    """sha256 over the paths and contents of a checkpoint folder, 64 hex digits."""
    return hashlib.sha256(canonical_json(_digests(Path(folder)))).hexdigest()


def _fetch_document(uri: str, sha256: str | None, cache: Path) -> Path:
    document = read_document(uri, Checkpoint, sha256=sha256)
    wanted = {file.path: file.sha256 for file in document.files}
    for path in wanted:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise InputError(f"document names a file outside its folder: {path!r}", where=uri)
    folder = cache / document.digest[:16]
    if folder.is_dir():
        if _digests(folder) == wanted:
            return folder
        shutil.rmtree(folder)
    with _whole_folder(folder, replace=False) as partial:
        for file in document.files:
            store, key = store_for(file.uri)
            store.get_file(key, partial / file.path, sha256=file.sha256)
    return folder


def _plain_files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.suffix in PLAIN_SUFFIXES and path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path != folder / DOCUMENT)


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in _plain_files(folder):
        with open(folder / path, "rb") as file:
            found[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
