"""A run: one recipe in one place of a store, made of steps that are done once.

    runs/RUN/recipe.json          what is run
    runs/RUN/steps/STEP.json      inputs (digest), outputs (references) and seconds of a finished step
    runs/RUN/failure.json         what stopped it, if something did
    runs/RUN/...                  what the steps made

A step whose inputs have not changed and whose outputs are intact is not done again, so a run that was interrupted goes
on where it stopped. Code that is not the same release does its steps anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mar_grpo import __version__
from mar_grpo.documents import (
    Checkpoint,
    Document,
    DocumentRef,
    GateDecision,
    PromptSet,
    ScoreTable,
    TrainingRun,
    read_document,
)
from mar_grpo.errors import InputError, MarGrpoError
from mar_grpo.progress import emit
from mar_grpo.store import Store, canonical_json, parse_json, read_uri, store_for

WORK = "MAR_GRPO_WORK"
Outputs = dict[str, DocumentRef]


@dataclass(frozen=True)
class Run:
    """Where a run lies and what its recipe says (as a dict; `config.Recipe` for the typed one)."""

    store: Store
    name: str

    @property
    def prefix(self) -> str:
        return f"runs/{self.name}"

    @property
    def uri(self) -> str:
        return self.store.uri(self.prefix)

    @classmethod
    def open(cls, uri: str) -> Run:
        """The run at a URI, as `uri` gives it."""
        root, found, name = uri.rstrip("/").rpartition("/runs/")
        if not found or "/" in name:
            raise InputError("not a run", where=uri, hint="a run lies at STORE/runs/NAME")
        return cls(Store(root), name)

    def work(self) -> Path:
        """Local folder for files that come from the store and may be lost."""
        base = os.environ.get(WORK) or os.path.join(tempfile.gettempdir(), f"mar-grpo-{os.getuid()}")
        return Path(base) / self.name

    def recipe_text(self) -> str:
        """The recipe as JSON text."""
        return self.store.read_bytes(f"{self.prefix}/recipe.json").decode()

    def delete(self) -> None:
        """Remove all that the run left in the store and locally."""
        for key in self.store.list(self.prefix):
            self.store.delete(key)
        shutil.rmtree(self.work(), ignore_errors=True)

    def step(self, name: str, inputs: Mapping[str, Any], make: Callable[[], tuple[Outputs, str]]) -> Outputs:
        """Do a step, or take its outputs if it is done.

        Args:
            inputs: all that the outputs depend on (canonical JSON data); for documents their digests.
            make: returns references to the documents it wrote, and one line that says what came of it.
        """
        identity = hashlib.sha256(canonical_json({"inputs": dict(inputs), "code": __version__})).hexdigest()
        done = self._done(name, identity)
        if done is not None:
            emit("step", step=name, state="reused", text=done["text"])
            return {key: DocumentRef.model_validate(reference) for key, reference in done["outputs"].items()}
        emit("step", step=name, state="started")
        started = time.monotonic()
        outputs, text = make()
        seconds = time.monotonic() - started
        record = {
            "inputs": identity,
            "outputs": {key: reference.model_dump() for key, reference in outputs.items()},
            "seconds": seconds,
            "text": text,
            "finished": time.time(),
        }
        self.store.write_json(f"{self.prefix}/steps/{name}.json", record)
        emit("step", step=name, state="done", seconds=seconds, text=text)
        return outputs

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, record) of every finished step, in the order they ended."""
        names = [key.rsplit("/", 1)[1] for key in self.store.list(f"{self.prefix}/steps")]
        found = [(Path(name).stem, self.store.read_json(f"{self.prefix}/steps/{name}")) for name in names]
        return sorted(found, key=lambda item: item[1]["finished"])

    def _done(self, name: str, identity: str) -> dict[str, Any] | None:
        key = f"{self.prefix}/steps/{name}.json"
        if not self.store.exists(key):
            return None
        record = self.store.read_json(key)
        intact = record["inputs"] == identity and all(
            intact_document(DocumentRef.model_validate(reference)) for reference in record["outputs"].values()
        )
        return record if intact else None


_KINDS: tuple[type[Document], ...] = (PromptSet, Checkpoint, TrainingRun, ScoreTable, GateDecision)


def intact_document(reference: DocumentRef) -> bool:
    """Whether a document is the referenced one and what it lists is there in full size (digests are checked on use)."""
    try:
        data = parse_json(read_uri(reference.uri, sha256=reference.sha256), where=reference.uri)
        cls = {kind.model_fields["document"].default: kind for kind in _KINDS}[data["document"]]
        document = read_document(reference, cls)
        listed: list[tuple[str, int | None]] = []
        if isinstance(document, PromptSet):
            listed = [(shard.uri, shard.bytes) for shard in document.shards]
        elif isinstance(document, Checkpoint):
            listed = [(file.uri, file.bytes) for file in document.files]
        elif isinstance(document, ScoreTable):
            listed = [(uri, None) for uri in (document.rows_uri, document.images_uri) if uri]
        elif isinstance(document, TrainingRun):
            listed = [(document.metrics_uri, None)]
        for uri, size in listed:
            store, key = store_for(uri)
            if (size is None and not store.exists(key)) or (size is not None and store.stat(key)[0] != size):
                return False
    except InputError:
        return False
    return True


@contextlib.contextmanager
def surfaced(step: str, run: str = "") -> Iterator[None]:
    """Turn an error inside a pipeline step into an event, `failure.json` and the documented exit code."""
    try:
        yield
    except MarGrpoError as error:
        _record_failure(step, run, str(error), error.exit_code)
        raise SystemExit(error.exit_code) from error
    except Exception as error:
        _record_failure(step, run, f"{type(error).__name__}: {' '.join(str(error).split())}", 1)
        raise


def _record_failure(step: str, run: str, text: str, exit_code: int) -> None:
    emit("step", step=step, state="failed")
    emit("failure", step=step, error=text, exit_code=exit_code)
    if run:
        with contextlib.suppress(MarGrpoError):  # the store may be what failed
            opened = Run.open(run)
            quick = Store(opened.store.uri(), retry_seconds=2)
            quick.write_json(f"{opened.prefix}/failure.json", {"step": step, "error": text, "exit_code": exit_code})
