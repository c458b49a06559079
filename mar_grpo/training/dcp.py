"""Tensors of all ranks in a store and back, through torch.distributed.checkpoint (DCP). All that knows DCP is here.

DCP plans who writes which part of a sharded tensor and who reads which part for another number of processes; the bytes
go through our Store (atomic, read back, retried), and its index is JSON with a sha256 of every part, not a pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    load,
    save,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from mar_grpo.errors import InputError, MarGrpoError
from mar_grpo.store import Store

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")  # on purpose
FILE_BYTES = 2**29
"""A rank's tensors are written in objects of about this size, so that no more than that is in memory once more."""


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether ranks hold different parts, so that all of them have to save."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy in CPU memory that later steps do not change; of a sharded tensor this rank's part."""
    if is_sharded(tensors):
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        staged: Any = DefaultStager(options).stage(dict(tensors))
        return staged
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def save_tensors(
    store: Store, folder: str, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Any] | None:
    """Write tensors under `folder`; the index that `load_tensors` reads, on the first rank (elsewhere None).

    Args:
        group: of all ranks, when they hold parts; None: this process alone has everything.

    Errors: those of the store, of whichever rank.
    """
    writer = _Writer(store, folder)
    with _errors():
        save(
            dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None,
            planner=DefaultSavePlanner(flatten_state_dict=False),
        )  # fmt: skip
    return writer.index


def load_tensors(store: Store, folder: str, index: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, in the CPU's memory; sharded as those of `like` that are (each rank reads its part).

    Errors: InputError when bytes are missing or not those that were written; those of the store.
    """
    metadata = _metadata(index)
    into: dict[str, Tensor] = {}
    for name, found in metadata.state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata)
        model, dtype = like.get(name), found.properties.dtype
        if isinstance(model, DTensor):
            into[name] = torch.empty_like(model, dtype=dtype)
        else:
            into[name] = torch.empty(found.size, dtype=dtype)
    with _errors():
        load(
            into, storage_reader=_Reader(store, folder, metadata), no_dist=True,
            planner=DefaultLoadPlanner(flatten_state_dict=False),
        )  # fmt: skip
    return into


class _Writer(StorageWriter):
    """Writes what a rank's plan says into a few objects; keeps the index."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        self.index: dict[str, Any] | None = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        data, files = bytearray(), 0
        for number, item in enumerate(plan.items):
            name = f"rank-{plan.storage_data:04d}-{files:04d}.bin"
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            part = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            place = {"file": name, "start": len(data), "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
            results.append(WriteResult(index=item.index, size_in_bytes=len(part), storage_data=place))
            data += part
            if len(data) >= FILE_BYTES or number == len(plan.items) - 1:
                self.store.write_bytes(f"{self.folder}/{name}", bytes(data))
                data, files = bytearray(), files + 1
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for some in results for result in some}
        self.index = {}
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata)
            chunks = [
                {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                | places[MetadataIndex(name, chunk.offsets)]
                for chunk in found.chunks
            ]
            dtype = str(found.properties.dtype).removeprefix("torch.")
            self.index[name] = {"dtype": dtype, "size": list(found.size), "chunks": chunks}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class _Reader(StorageReader):
    """Reads the parts that a rank's plan asks for."""

    def __init__(self, store: Store, folder: str, metadata: Metadata) -> None:
        self.store, self.folder, self.metadata = store, folder, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.metadata.storage_data[item.storage_index]
            key = f"{self.folder}/{place['file']}"
            part = self.store.read_range(key, place["start"], place["bytes"])
            if hashlib.sha256(part).hexdigest() != place["sha256"]:
                what = f"{item.storage_index.fqn} is damaged: its bytes are not those that were saved"
                raise InputError(what, where=self.store.uri(key))
            target = planner.resolve_tensor(item).detach()
            if part:
                whole = torch.frombuffer(bytearray(part), dtype=target.dtype).reshape(place["sizes"])
                corner = [slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
                target.copy_(whole[tuple(corner)])
            planner.commit_tensor(item, target)
        return _done(None)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _metadata(index: Mapping[str, Any]) -> Metadata:
    """DCP's own form of an index."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, found in index.items():
        chunks = [ChunkStorageMetadata(torch.Size(one["offsets"]), torch.Size(one["sizes"])) for one in found["chunks"]]
        properties = TensorProperties(dtype=getattr(torch, found["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(found["size"]), chunks)
        places |= {MetadataIndex(name, one["offsets"]): one for one in found["chunks"]}
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Our own errors as they are, not inside DCP's."""
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, MarGrpoError):
                raise cause from None
        raise
