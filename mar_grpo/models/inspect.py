"""What a checkpoint is, and the same in another layout: `mar-grpo checkpoint inspect` and `convert`."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mar_grpo.errors import InputError
from mar_grpo.models.checkpoint import fetch_checkpoint, folder_digest, load_policy, publish_checkpoint, save_policy
from mar_grpo.models.export import Layout, configuration, published_tensors
from mar_grpo.models.layouts import open_contents
from mar_grpo.models.policy import Policy
from mar_grpo.store import store_for


@dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
        name: as in the published names of its tensors; the diffusion head has a row of its own.
        sha256: over names, dtypes, shapes and bytes of its tensors, the same in every layout.
        trained: whether reinforcement learning changes it.
    """

    name: str
    parameters: int
    bytes: int
    dtype: str
    sha256: str
    trained: bool


@dataclass(frozen=True)
class Description:
    """What `inspect` prints. `sha256`: `folder_digest` of the folder or file."""

    uri: str
    family: str
    layout: str
    sha256: str
    configuration: dict[str, Any]
    parts: tuple[Part, ...]


def describe(uri: str, cache: Path, others: Sequence[str] = ()) -> Description:
    """Load a checkpoint, which checks every tensor of it, and describe it. InputError as `load_policy`."""
    place, more = fetch_checkpoint(uri, cache), [fetch_checkpoint(other, cache) for other in others]
    policy = load_policy(place, others=more, dtype=None)
    family = type(policy).__name__.removesuffix("Policy")
    layout = "NOVA folder" if family == "Nova" else open_contents(place, more).layout
    return Description(uri, family, layout, folder_digest(place), configuration(policy), tuple(_parts(policy)))


def _parts(policy: Policy) -> list[Part]:
    head, trunk = ({id(value) for value in group} for group in (policy.head_parameters(), policy.trunk_parameters()))
    at = {value.data_ptr(): id(value) for value in policy.parameters()}
    rows: dict[str, dict[str, Tensor]] = {}
    trained = set()
    for part, tensors in published_tensors(policy).items():
        known = {name: at.get(tensor.data_ptr()) for name, tensor in tensors.items()}
        mixed = any(identity in trunk for identity in known.values())
        for name, tensor in tensors.items():
            label = part
            if known[name] in head:
                label = f"{part}, diffusion head"
            elif known[name] in trunk:
                trained.add(label)
            elif mixed:
                label = f"{part}, not trained"
            rows.setdefault(label, {})[name] = tensor
    return [_part(label, tensors, label in trained) for label, tensors in rows.items()]


def _part(name: str, tensors: Mapping[str, Tensor], trained: bool) -> Part:
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    count, size = (
        sum(sizes) for sizes in zip(*((each.numel(), each.nbytes) for each in tensors.values()), strict=True)
    )
    return Part(name, count, size, ", ".join(kinds), digest.hexdigest(), trained)


def convert(
    uri: str,
    target: str,
    cache: Path,
    *,
    layout: Layout = "ours",
    dtype: str | None = None,
    others: Sequence[str] = (),
) -> str:
    """Write a checkpoint in another layout. Tensors keep their bytes unless `dtype` asks for another storage.

    Args:
        target: path or URI of a folder, or of a .pth file (published layout of MAR or Harmon). What is ours gets a
            Checkpoint document beside its files.

    Returns:
        the URI of what was written.
    """
    more = [fetch_checkpoint(other, cache) for other in others]
    policy = load_policy(fetch_checkpoint(uri, cache), others=more, dtype=None)
    store, key = store_for(target.rstrip("/"))
    if store.list(key) or store.exists(key):
        raise InputError("there is something already", where=target, hint="name a new folder or file")
    with tempfile.TemporaryDirectory(dir=_made(Path(store.root) if store.scheme == "file" else cache)) as folder:
        kind = getattr(torch, dtype) if dtype else None
        made = save_policy(policy, Path(folder) / Path(key).name, dtype=kind, layout=layout)
        if made.is_file():
            return store.put_file(made, key).uri
        if layout == "ours":
            return publish_checkpoint(made, store, key).uri
        store.put_folder(made, key)
    return store.uri(key)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def show(description: Description, console: Console) -> None:
    """Tables on a terminal; elsewhere JSON lines, one for the checkpoint, then one for each part."""
    about = {name: getattr(description, name) for name in ("uri", "family", "layout", "sha256")}
    if not console.is_terminal:
        for row in (about | {"configuration": description.configuration}, *map(asdict, description.parts)):
            print(json.dumps(row, sort_keys=True))
        return
    head = Table(box=None, show_header=False)
    for name, value in (about | _one_level(description.configuration)).items():
        head.add_row(name, str(value))
    table = Table("part", "parameters", "MiB", "dtype", "sha256", "trained")
    for part in description.parts:
        size, trained = f"{part.bytes / 2**20:,.1f}", "yes" if part.trained else "no"
        table.add_row(part.name, f"{part.parameters:,}", size, part.dtype, part.sha256[:16], trained)
    table.add_section()
    parameters, size = (sum(getattr(part, name) for part in description.parts) for name in ("parameters", "bytes"))
    table.add_row("all", f"{parameters:,}", f"{size / 2**20:,.1f}")
    console.print(head)
    console.print(table)


def _one_level(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _one_level(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
