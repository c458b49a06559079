"""Everything a run needs to go on where it stopped: saved beside training, read back, then pointed at.

    state/LATEST                      pointer to the last whole state; written last
    state/update-000010/state.json    what is no tensor, and where each tensor is, with digests
    state/update-000010/rank-*.bin    the tensors

A state holds the trained parameters, the optimiser, the average, the reference where it moves, the place in the
prompts, and the metrics so far, from which the health checks take their memory. It holds no random generator:
everything random is drawn from (seed, update, place), so the number of updates says it all, as for the schedule.

Saving takes a copy in memory; a thread writes it while training goes on. One state is written at a time: one that falls
due meanwhile is made at the first update after. A store that is away is waited for by that thread only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mar_grpo.errors import InputError
from mar_grpo.store import FileEntry, Store
from mar_grpo.training.dcp import copied, is_sharded, load_tensors, save_tensors
from mar_grpo.training.distributed import Processes
from mar_grpo.training.resume import refuse_changes

if TYPE_CHECKING:
    from mar_grpo.training.learner import Learner

LATEST = "state/LATEST"
TENSOR = "tensor://"


class KeepConfig(BaseModel):
    """Which saved states stay; the others are deleted after a newer one is whole.

    Args:
        last: the newest ones.
        best: also the one with the highest held-out score, of those saved after an update with a look.
        every: also those after every so many updates; 0: none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    last: int = Field(2, gt=0)
    best: bool = True
    every: int = Field(0, ge=0)

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """Updates whose states stay, of those with a state (update -> held-out score)."""
        updates = sorted(scores)
        kept = set(updates[-self.last :]) | {update for update in updates if self.every and update % self.every == 0}
        best = best_of(scores)
        return kept | ({best} if self.best and best is not None else set())


def best_of(scores: Mapping[int, float | None]) -> int | None:
    """The update with the highest score, the first of equals; None when there is none with a score."""
    scored = [(score, -update) for update, score in scores.items() if score is not None]
    return -max(scored)[1] if scored else None


class States:
    """The saved states of one run. Every method is called by all processes.

    Args:
        about: what the run is of: `recipe` (as JSON data) and digests of what it starts from. Another one is refused,
            except for changes of the recipe that `resume` lists.
        store: its `retry_seconds` is how long saving waits for a store that is away.
    """

    def __init__(
        self, store: Store, prefix: str, processes: Processes, keep: KeepConfig, about: Mapping[str, Any]
    ) -> None:
        self.store, self.prefix, self.processes, self.keep, self.about = store, prefix, processes, keep, dict(about)
        self._thread = ThreadPoolExecutor(1)
        self._saving: Future[None] | None = None
        self._due = False
        self._newest: int | None = None
        self._scores: dict[int, float | None] = {}
        self._group: dist.ProcessGroup | None = None

    def load(self, learner: Learner, update: int | None = None) -> dict[str, Any] | None:
        """The last state, or that after `update`: `update`, `learner` (for Learner.restore) and what `save` was given.

        None when there is none.

        Raises:
            InputError: it is damaged, or of another recipe, checkpoint or prompt set.
        """
        pointer = f"{self.prefix}/{LATEST}"
        if not self.store.exists(pointer):
            return None
        target = self.store.read_pointer(pointer)
        key = self.store.key(target.uri) if update is None else self._key(update)
        state = self.store.read_json(key, sha256=target.sha256 if update is None else None)
        for name, value in self.about.items():
            if name != "recipe" and state["about"][name] != value:
                what = f"the saved state belongs to another {name.replace('_', ' ')}: {state['about'][name]} -> {value}"
                hint = "give the run another name, or delete its state to start anew"
                raise InputError(what, where=target.uri, hint=hint)
        refuse_changes(state["about"]["recipe"], self.about["recipe"], done=state["update"], where=target.uri)
        self._scores = {number: self.store.read_json(self._key(number))["score"] for number in self._whole()}
        tensors = load_tensors(
            self.store, key.rpartition("/")[0], state["tensors"], _likeness(learner, state["tensors"])
        )
        self._newest = state["update"]
        joined = _join(state["learner"], tensors)
        return json.loads(state["notes"]) | {"update": state["update"], "learner": joined}

    def save(
        self, update: int, learner: Callable[[], Mapping[str, Any]], notes: Callable[[], Mapping[str, Any]],
        *, due: bool, score: float | None = None,
    ) -> None:  # fmt: skip
        """To be called after every update: saves its state if one is `due`, or was and could not be begun.

        Args:
            learner: gives Learner.state(); notes: gives the rest, as JSON data.
            score: of the held-out judge, if it has looked at this update.

        Errors: those of the save before, on all processes.
        """
        self._due = due or self._due
        with self.processes.together():
            if self._saving and self._saving.done():
                done, self._saving = self._saving, None
                done.result()
        if self._due and not any(self.processes.gather(self._saving is not None)):
            self._due = False
            self.save_alone(update, learner(), notes(), score)

    def save_alone(
        self, update: int, learner: Mapping[str, Any], notes: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Begin to save, without asking other processes; of a learner in parts all have to call it."""
        if update == self._newest:
            return
        tensors: dict[str, Tensor] = {}
        skeleton = _split(learner, "", tensors)
        if is_sharded(tensors):
            self._group = self._group or dist.new_group(backend="gloo")  # the thread's own: training uses the other
        elif not self.processes.first:
            return
        text = json.dumps(dict(notes), allow_nan=False)  # as text, so that the order of keys stays
        head = {"update": update, "score": score, "about": self.about, "learner": skeleton, "notes": text}
        self._newest = update
        self._saving = self._thread.submit(self._write, update, head, copied(tensors))

    def wait(self) -> None:
        """Until what is being saved is whole. Errors: those of saving, on all processes."""
        with self.processes.together():
            self.wait_alone()

    def wait_alone(self) -> None:
        """The same without asking other processes."""
        saving, self._saving = self._saving, None
        if saving:
            saving.result()

    def _write(self, update: int, head: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """In the thread."""
        folder = self._key(update).rpartition("/")[0]
        if self.processes.first and update in self._scores:  # made again, from an earlier state
            self.store.delete(self._key(update))
        index = save_tensors(self.store, folder, tensors, self._group if is_sharded(tensors) else None)
        if not self.processes.first:
            return
        self._point(self.store.write_json(self._key(update), head | {"tensors": index}))
        self._scores[update] = head["score"]
        self._prune()

    def _point(self, target: FileEntry) -> None:
        self.store.write_pointer(f"{self.prefix}/{LATEST}", target)

    def _prune(self) -> None:
        """Delete what is not kept, and what saves that were killed have left."""
        kept = self.keep.kept(self._scores)
        for key in sorted(self.store.list(f"{self.prefix}/state"), reverse=True):  # state.json before its tensors
            number = _number(key)
            if number is not None and number not in kept:
                self.store.delete(key)
        self._scores = {update: score for update, score in self._scores.items() if update in kept}

    def _whole(self) -> list[int]:
        keys = [key for key in self.store.list(f"{self.prefix}/state") if key.endswith("/state.json")]
        return [number for number in map(_number, keys) if number is not None]

    def _key(self, update: int) -> str:
        return f"{self.prefix}/state/update-{update:06d}/state.json"


def _number(key: str) -> int | None:
    """The update in the key of one of a state's objects."""
    folder = key.split("/")[-2]
    return int(folder.removeprefix("update-")) if folder.startswith("update-") else None


def _split(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A tree as JSON data, its tensors taken out by name. Whole numbers as keys are written as #NUMBER."""
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return TENSOR + name
    if isinstance(tree, Mapping):
        keys = {key: f"#{key}" if isinstance(key, int) else key for key in tree}
        return {keys[key]: _split(value, f"{name}/{keys[key]}".strip("/"), tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_split(value, f"{name}/{number}", tensors) for number, value in enumerate(tree)]
    return tree


def _join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `_split` took apart; tuples are lists now."""
    if isinstance(tree, str) and tree.startswith(TENSOR):
        return tensors[tree.removeprefix(TENSOR)]
    if isinstance(tree, dict):
        return {int(key[1:]) if key.startswith("#") else key: _join(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_join(value, tensors) for value in tree]
    return tree


def _likeness(learner: Learner, index: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors sharded as those of the index are to be read: a fresh optimiser has none, so its parameters stand in."""
    like: dict[str, Tensor] = {}
    _split(learner.state(), "", like)
    parameters = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
    for name, found in index.items():
        part, *path = name.split("/")
        if part == "optimizer" and path[0] == "state":
            parameter = parameters[int(path[1].removeprefix("#"))]
            if list(parameter.shape) == found["size"]:
                like[name] = parameter
    return like
