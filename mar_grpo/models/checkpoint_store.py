"""Checkpoints in stores: published with a document that names every file and digest, fetched and checked against it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

from mar_grpo.documents import Checkpoint, CheckpointFile, DocumentRef, read_document, write_document
from mar_grpo.errors import InputError
from mar_grpo.models.export import NOVA, whole_folder
from mar_grpo.models.layouts import COMPANIONS, INDEX, SAFETENSORS, TORCH, is_autoencoder, read_config
from mar_grpo.store import Store, canonical_json, store_for

DOCUMENT = "checkpoint.json"  # the Checkpoint document beside the files
SUFFIXES = (".json", ".txt", SAFETENSORS, *TORCH)  # what a checkpoint is made of; code in its folder stays behind


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
    family, config = _identity(folder)
    files = []
    for path in _plain_files(folder):
        entry = store.put_file(folder / path, f"{prefix}/{path}")
        files.append(CheckpointFile(path=path, uri=entry.uri, bytes=entry.bytes, sha256=entry.sha256))
    document = Checkpoint(
        family=family, config=config, files=tuple(files), step=step, parent=parent, recipe_digest=recipe_digest
    )
    return write_document(store, f"{prefix}/{DOCUMENT}", document)


def _identity(folder: Path) -> tuple[str, dict[str, Any]]:
    """Family and configuration of a saved folder."""
    hint = "only folders as we save them have a document; `mar-grpo checkpoint convert` makes one of anything else"
    if not any((folder / name).exists() for name in ("config.json", "model_index.json")):
        raise InputError("checkpoint has neither config.json nor model_index.json", where=str(folder), hint=hint)
    if (folder / "config.json").exists():
        config = read_config(folder / "config.json")
        return config.get("model_type", "mar"), config
    read_config(folder / "model_index.json")
    config = {name: read_config(folder / name / "config.json") for name in ("transformer", "vae", "text_encoder")}
    return NOVA, config | {"scheduler": read_config(folder / "scheduler/scheduler_config.json")}


def fetch_checkpoint(source: DocumentRef | str, cache: str | os.PathLike[str], *, sha256: str | None = None) -> Path:
    """A local folder (or weights file) that is the checkpoint, every byte checked against the digests that are known.

    Args:
        source: a reference or URI of a Checkpoint document; or `package://NAME` (shipped with this package), a path or
            URI of a folder or of a weights file, which comes with the files beside it that belong to it. A folder with
            a document beside its files is read through the document.
        cache: local folder for what comes from a store; what lies there already and is right is not fetched again.
        sha256: digest of the document, or `folder_digest` of a folder or file without one.

    Raises:
        InputError: no such checkpoint, or a digest is wrong.
    """
    uri, pin = (source.uri, source.sha256) if isinstance(source, DocumentRef) else (source.rstrip("/"), sha256)
    cache = Path(cache)
    if uri.startswith("package://"):
        place = Path(str(resources.files("mar_grpo.assets") / uri.removeprefix("package://")))
    else:
        store, key = store_for(uri)
        if key.endswith(".json") and not key.endswith(INDEX):
            return _fetch_document(uri, pin, cache)
        if key.endswith((SAFETENSORS, INDEX, *TORCH)):
            place = _fetch_file(store, key, cache)
        elif store.exists(f"{key}/{DOCUMENT}"):
            return _fetch_document(f"{uri}/{DOCUMENT}", pin, cache)
        else:
            place = _fetch_keys(store, store.list(key), key, cache)
    if not place.exists():
        raise InputError("checkpoint folder does not exist", where=uri)
    if pin is not None and folder_digest(place) != pin:
        what = f"checkpoint has digest {folder_digest(place)}, {pin} was asked for"
        raise InputError(what, where=uri, hint="correct the digest or the URI")
    return place


def _fetch_file(store: Store, key: str, cache: Path) -> Path:
    """A weights file, the shards of its index, and the configuration, tokenizer and autoencoder beside it."""
    folder, _, name = key.rpartition("/")
    keys = [key]
    for other in store.list(folder):
        beside = other.removeprefix(f"{folder}/") if folder else other
        if "/" not in beside and (
            beside in COMPANIONS or is_autoencoder(beside) or (name.endswith(INDEX) and beside.endswith(SAFETENSORS))
        ):
            keys.append(other)
    return _fetch_keys(store, sorted(set(keys)), folder, cache) / name


def _fetch_keys(store: Store, keys: Sequence[str], prefix: str, cache: Path) -> Path:
    """A local folder with these objects of the folder `prefix`; for a store on this machine that folder itself."""
    if store.scheme == "file":
        return Path(store.root, prefix)
    if not keys:
        raise InputError("the folder is empty or does not exist", where=store.uri(prefix))
    version = canonical_json([(store.uri(), key, *store.stat(key)) for key in keys])
    folder = cache / hashlib.sha256(version).hexdigest()[:16]
    if not folder.is_dir():
        with whole_folder(folder, replace=False) as partial:
            for key in keys:
                store.get_file(key, partial / (key[len(prefix) + 1 :] if prefix else key))
    return folder


def folder_digest(folder: str | os.PathLike[str]) -> str:
    """sha256 over the paths and contents of a checkpoint folder, 64 hex digits; of a file, that of its bytes."""
    if Path(folder).is_file():
        return _sha256(Path(folder))
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
    with whole_folder(folder, replace=False) as partial:
        for file in document.files:
            store, key = store_for(file.uri)
            store.get_file(key, partial / file.path, sha256=file.sha256)
    return folder


def _plain_files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path != folder / DOCUMENT)


def _digests(folder: Path) -> dict[str, str]:
    return {path: _sha256(folder / path) for path in _plain_files(folder)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
