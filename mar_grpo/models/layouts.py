"""Every layout in which MAR and Harmon checkpoints are found, read without running anything in them.

    file      X.safetensors; X.safetensors.index.json and its shards; X.pth, .ckpt, .pt or .bin by torch, weights only:
              the dict of tensors itself, or the one under `model_ema`, else `model`, else `state_dict`
    folder    one such file (model.*, checkpoint-last.pth, or the only one), with the following beside it

Beside the file there may be config.json, tokenizer.json (Harmon), classes.json (MAR) and the autoencoder as kl16.* or
vae.*, where it is not inside. Names are brought to the published form of Harmon by this table:

    module.X                                                X         (data-parallel training)
    mar.X, llm.X, proj_in.X, proj_out.X, vae.X              as they are
    encoder.X, decoder.X, quant_conv.X, post_quant_conv.X   vae.X     (a bare KL-16 file; its loss.* is of training)
    any other X                                             mar.X     (a bare MAR file)

What a file lacks may come from others: KL-16 for MAR, all of Harmon around a fine-tuned MAR sub-module.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mar_grpo.errors import InputError

SAFETENSORS, INDEX = ".safetensors", ".index.json"
TORCH = (".pth", ".ckpt", ".pt", ".bin")
PARTS = ("mar", "llm", "proj_in", "proj_out", "vae")
COMPANIONS = ("config.json", "tokenizer.json", "classes.json")
_MAIN = ("model.safetensors", "model.safetensors.index.json", "checkpoint-last.pth")
_KL16 = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_NOVA = ("video_encoder.", "image_encoder.", "image_decoder.")
# Keys that transformers and diffusers write into any config.json, beside _those; they say nothing about the network.
HOUSEKEEPING = {"architectures", "auto_map", "torch_dtype", "dtype", "transformers_version"}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: mapped, so that its values are read when they are used. `under`: key of its dict there."""

    file: Path
    name: str
    tensor: Tensor
    under: str = ""

    def read(self, dtype: torch.dtype | None) -> Tensor:
        """The values; the mapped file itself where `dtype` (None: as stored) asks for no conversion."""
        if dtype is None or dtype == self.tensor.dtype:
            return self.tensor
        tensor = self.tensor
        if self.file.suffix == SAFETENSORS:  # through a mapping of its own: what was read does not stay in memory
            with safe_open(self.file, framework="pt") as file:
                tensor = file.get_tensor(self.name)
        return tensor.to(dtype).view(self.tensor.shape)


def finite(tensor: Tensor) -> bool:
    """Whether all values are finite numbers; in pieces, so that no copy of it is made."""
    bounds = [torch.stack(piece.float().aminmax()) for piece in tensor.flatten().split(2**22) if len(piece)]
    return all(bool(bound.isfinite().all()) for bound in bounds)


# --- files -------------------------------------------------------------------------------------------------------


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


def read_weights(path: Path) -> list[Stored]:
    """The tensors of a file, or of all shards of an index; their values are not read yet.

    Raises:
        InputError: the file is missing, cut, no such file or a pickle with more than tensors; a shard lacks a tensor
            that the index promises.
    """
    try:
        if path.name.endswith(INDEX):
            return list(_read_index(path))
        if path.suffix == SAFETENSORS:
            return _read_safetensors(path)
        if path.suffix in TORCH:
            return _read_torch(path)
    except FileNotFoundError:
        raise InputError("checkpoint file is missing", where=str(path)) from None
    raise InputError(f"weights are in {SAFETENSORS}, {INDEX} or {', '.join(TORCH)} files", where=str(path))


def read_stem(folder: Path, stem: str) -> list[Stored]:
    """The tensors of STEM.safetensors, or of every shard that STEM.safetensors.index.json lists; errors as above."""
    single, index = (folder / f"{stem}{SAFETENSORS}{end}" for end in ("", INDEX))
    return read_weights(index if index.exists() and not single.exists() else single)


def _read_safetensors(path: Path) -> list[Stored]:
    try:
        with safe_open(path, framework="pt") as file:
            return [Stored(path, name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        hint = "fetch the file again"
        raise InputError(f"weights are cut or damaged: {error}", where=str(path), hint=hint) from error


def _read_index(index: Path) -> Iterator[Stored]:
    places = read_config(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise InputError("index has no weight_map of tensor names to files", where=str(index))
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard or shard.endswith(INDEX):
            raise InputError(f"index names a file outside its folder: {shard}", where=str(index))
        path = index.with_name(shard)
        tensors = {stored.name: stored for stored in read_weights(path)}
        for name in (name for name, place in places.items() if place == shard):
            if name not in tensors:
                raise InputError(f"tensor {name} is missing", where=str(path))
            yield tensors[name]


def _read_torch(path: Path) -> list[Stored]:
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # files of torch before 1.6 are not, and cannot be mapped
    try:
        # argparse.Namespace (`args` of MAR's training) is a bag of values and does nothing when it is made.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise InputError("weights are no torch file, or damaged", where=str(path)) from error
        what = f"the pickle asks for code to be run ({code[1]}); only tensors are read"
        raise InputError(what, where=str(path), hint="save its tensors alone") from error
    except (OSError, ValueError, KeyError, EOFError, RuntimeError) as error:
        reason = re.split(r"\. |\n", str(error))[0] or type(error).__name__
        hint = "fetch the file again"
        raise InputError(f"weights are cut or damaged: {reason}", where=str(path), hint=hint) from error
    wrapped = [key for key in ("model_ema", "model", "state_dict") if isinstance(content, dict) and key in content]
    content, under = (content[wrapped[0]], wrapped[0]) if wrapped else (content, "")
    if not isinstance(content, dict) or not content:
        raise InputError("torch file holds no dict of tensors", where=str(path))
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(f"torch file holds {name!r}, which is no tensor", where=str(path))
    return [Stored(path, name, tensor.detach(), under) for name, tensor in content.items()]


# --- checkpoints -------------------------------------------------------------------------------------------------


@dataclass
class Contents:
    """What lies at one place.

    Attributes:
        layout: in words.
        config: of config.json, what it says about "mar", "llm" and "vae".
        tensors: by published name.
        tokenizer, classes: files beside, if any.
    """

    layout: str
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    tokenizer: Path | None = None
    classes: Path | None = None

    @property
    def family(self) -> str:
        """ "harmon" where there is a language model, else "mar"."""
        return "harmon" if "llm" in self.config or self.part("llm") else "mar"

    def part(self, name: str) -> dict[str, Stored]:
        """Tensors of one of PARTS, without its prefix."""
        return {
            key.removeprefix(f"{name}."): value for key, value in self.tensors.items() if key.startswith(f"{name}.")
        }


def open_contents(path: Path, others: Sequence[Path] = ()) -> Contents:
    """A MAR or Harmon checkpoint and, from `others` in their order, what it lacks.

    Raises:
        InputError: no or several weights files, an unreadable one, a tensor that is there twice, an unknown key in
            config.json.
    """
    found = _look(path)
    if not found.part("mar"):
        hint = "give the weights file itself; an autoencoder alone is no checkpoint"
        raise InputError("no MAR or Harmon weights found", where=str(path), hint=hint)
    for other in map(_look, others):
        for part in PARTS:
            if not found.part(part):
                found.tensors |= {key: value for key, value in other.tensors.items() if key.startswith(f"{part}.")}
                found.config |= {part: other.config[part]} if part in other.config else {}
        if "mar" in other.config:
            found.config.setdefault("mar", other.config["mar"])
        found.tokenizer, found.classes = found.tokenizer or other.tokenizer, found.classes or other.classes
    return found


def _look(path: Path) -> Contents:
    if not path.exists():
        raise InputError("checkpoint does not exist", where=str(path))
    folder = path if path.is_dir() else path.parent
    weights = _main_file(path) if path.is_dir() else path
    stored = read_weights(weights) if weights else []
    tensors = _published(stored)
    layout = "no weights" if weights is None else _words(weights, stored)
    autoencoders = [file for file in _weight_files(folder) if is_autoencoder(file.name)]
    if len(autoencoders) == 1 and not any(name.startswith("vae.") for name in tensors):
        tensors |= _published(read_weights(autoencoders[0]))
        layout += f", {autoencoders[0].name} beside it"
    config, tokenizer, classes = (folder / f"{name}.json" for name in ("config", "tokenizer", "classes"))
    return Contents(
        layout,
        _config(config) if config.is_file() and any(name.startswith("mar.") for name in tensors) else {},
        tensors,
        tokenizer if tokenizer.is_file() else None,
        classes if classes.is_file() else None,
    )


def _config(path: Path) -> dict[str, Any]:
    """The parts of a config.json: Harmon's {model_type, llm, mar}, ours with `vae` in addition, or MAR's keys alone."""
    content = {key: value for key, value in read_config(path).items() if not (key in HOUSEKEEPING or key[:1] == "_")}
    family = content.pop("model_type", None)
    if family not in (None, "harmon", "mar"):
        what = f"checkpoint family {family} is not supported; harmon, mar and NOVAPipeline are"
        raise InputError(what, where=f"{path}: model_type")
    if "mar" not in content:
        content = {"mar": content}
    unknown = sorted(content.keys() - {"mar", "llm", "vae", "image_size"})
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}", where=str(path))
    if family == "harmon" and "llm" not in content:
        raise InputError("key 'llm' is missing", where=str(path))
    return content


def _published(stored: Iterable[Stored]) -> dict[str, Stored]:
    """The tensors by published name (table in the module docstring)."""
    plain = [(each.name.removeprefix("module."), each) for each in stored]
    bare_autoencoder = any(name.startswith(_KL16) for name, _ in plain)
    found: dict[str, Stored] = {}
    for name, each in plain:
        if name.startswith(_NOVA):
            hint = "give the folder with model_index.json"
            raise InputError("a NOVA transformer alone is no checkpoint", where=str(each.file), hint=hint)
        if bare_autoencoder and name.startswith("loss."):
            continue
        if name.startswith(_KL16):
            name = f"vae.{name}"
        elif not name.startswith(tuple(f"{part}." for part in PARTS)):
            name = f"mar.{name}"
        if name in found:
            raise InputError(f"tensor {each.name} is there twice, also as {found[name].name}", where=str(each.file))
        found[name] = each
    return found


def _weight_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in (SAFETENSORS, *TORCH) and file.is_file())


def is_autoencoder(name: str) -> bool:
    """Whether a file of this name is the autoencoder beside a checkpoint."""
    return name.endswith((SAFETENSORS, *TORCH)) and (name.startswith("kl16") or name.rpartition(".")[0] == "vae")


def _main_file(folder: Path) -> Path | None:
    for name in _MAIN:
        if (folder / name).is_file():
            return folder / name
    indices = sorted(folder.glob(f"*{INDEX}"))
    files = indices or [file for file in _weight_files(folder) if not is_autoencoder(file.name)]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise InputError(f"several weights files: {names}", where=str(folder), hint="give one of them")
    return files[0] if files else None


def _words(weights: Path, stored: Sequence[Stored]) -> str:
    files = {each.file for each in stored}
    if weights.name.endswith(INDEX):
        return f"{weights.name}, {len(files)} shards"
    under = {each.under for each in stored} - {""}
    return weights.name + (f", tensors of {under.pop()!r}" if under else "")
