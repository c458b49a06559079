"""Saved states: which stay, that training does not wait for them, that they come back to the bit at any world size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mar_grpo.errors import InputError, RetryableError
from mar_grpo.store import Store
from mar_grpo.training.distributed import Processes
from mar_grpo.training.resume import refuse_changes
from mar_grpo.training.state import KeepConfig, States
from tests.unit.toy_run import free_port

ABOUT = {"recipe": {"seed": 0, "training": {"updates": 9}}, "checkpoint": "c", "prompts": "p"}


class Small:
    """What States needs of a learner: a network with an optimiser that has made two steps, or none."""

    def __init__(self, seed: int, steps: int, sharded: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        for parameter in self.net.parameters():
            parameter.data.normal_(generator=generator)
        if sharded:
            mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
            for part in (*self.net, self.net):
                fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        inputs = torch.randn(4, 5, generator=generator)
        for _ in range(steps):
            self.net(inputs).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "parameters": {name: value.detach() for name, value in self.net.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
        }

    def whole(self) -> dict[str, Tensor]:
        """Everything that counts, gathered."""
        tensors = dict(self.state()["parameters"])
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{name}": value for name, value in state.items()}
        return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        for name, value in self.net.named_parameters():
            value.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def states(store: Store, keep: KeepConfig | None = None, **about: Any) -> States:
    return States(store, "run", Processes(), keep or KeepConfig(), ABOUT | about)


def save(made: States, update: int, learner: Any, score: float | None = None) -> None:
    made.save(update, learner.state, lambda: {"metrics": [{"update": update, "a": 0.1}]}, due=True, score=score)
    made.wait()


def saved(store: Store) -> list[str]:
    return sorted({key.split("/")[2] for key in store.list("run/state") if key.endswith("state.json")})


def test_a_state_comes_back_to_the_last_bit(store: Store) -> None:
    before, after = Small(1, 2), Small(2, 0)
    before.net[0].bias.data[:3] = torch.tensor([-0.0, float("inf"), 1e-42])  # no number is special
    assert states(store).load(after) is None  # type: ignore[arg-type]
    save(states(store), 7, before)
    found = states(store).load(after)  # type: ignore[arg-type]
    assert found is not None and (found["update"], found["metrics"]) == (7, [{"update": 7, "a": 0.1}])
    after.restore(found["learner"])
    one, two = before.whole(), after.whole()
    assert one.keys() == two.keys() and len(one) == 4 + 4 * 3
    for name in one:
        assert one[name].numpy().tobytes() == two[name].numpy().tobytes()
    assert before.optimizer.state_dict()["param_groups"][0]["params"] == [0, 1, 2, 3]


def test_other_kinds_of_tensors(file_store: Store) -> None:
    half, turned = torch.linspace(0, 1, 6).bfloat16(), torch.arange(6.0).reshape(2, 3).t()
    tensors = {"half": half, "number": torch.tensor(3), "empty": torch.zeros(0, 4), "turned": turned}

    class Odd:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])

        def state(self) -> dict[str, Any]:
            return {"odd": tensors, "nothing": {}, "pair": (1, None)}

    save(states(file_store), 1, Odd())
    found = states(file_store).load(Odd())  # type: ignore[arg-type]
    assert found is not None and found["learner"]["nothing"] == {} and found["learner"]["pair"] == [1, None]
    for name, value in tensors.items():
        back = found["learner"]["odd"][name]
        assert back.dtype == value.dtype and torch.equal(back, value)


@pytest.mark.parametrize(
    ("keep", "scores", "kept"),
    [
        ({}, {1: None, 2: None, 3: None}, {2, 3}),
        ({"last": 1}, {1: 0.5, 2: 0.4, 3: None}, {1, 3}),
        ({"last": 1}, {1: 0.5, 2: 0.5, 3: 0.5}, {1, 3}),
        ({"last": 1, "best": False}, {1: 0.5, 2: 0.4, 3: None}, {3}),
        ({"last": 1, "every": 2}, {2: None, 3: None, 4: None, 5: None, 7: None}, {2, 4, 7}),
        ({"last": 9}, {1: None, 5: 0.1}, {1, 5}),
    ],
)
def test_what_is_kept(keep: dict[str, Any], scores: dict[int, float | None], kept: set[int]) -> None:
    assert KeepConfig(**keep).kept(scores) == kept


def test_old_states_are_deleted_and_so_is_what_a_kill_left(store: Store) -> None:
    store.write_bytes("run/state/update-000003/rank-0000-0000.bin", b"half a state")
    made, learner = states(store), Small(1, 1)
    for update, score in ((2, 0.7), (4, 0.3), (6, None), (8, 0.2)):
        save(made, update, learner, score)
    assert saved(store) == ["update-000002", "update-000006", "update-000008"]
    assert not [key for key in store.list("run/state") if "update-000003" in key]
    again = states(store)
    again.load(learner)  # type: ignore[arg-type]
    save(again, 10, learner, 0.6)
    assert saved(store) == ["update-000002", "update-000008", "update-000010"], "scores are remembered"
    save(again, 12, learner, 0.9)
    assert saved(store) == ["update-000010", "update-000012"]


class Slow(Store):
    """A store whose writes wait until they may go on, or fail."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.go, self.error = threading.Event(), False

    def write_bytes(self, key: str, data: bytes) -> Any:
        assert self.go.wait(60)
        if self.error:
            raise RetryableError("the store is away", where=key)
        return super().write_bytes(key, data)


def test_training_goes_on_while_a_state_is_written(tmp_path: Path) -> None:
    store = Slow(str(tmp_path))
    made, learner = states(store), Small(1, 1)
    before = learner.whole()["0.weight"].clone()
    notes = lambda: {"metrics": []}  # noqa: E731
    made.save(2, learner.state, notes, due=True)
    learner.net[0].weight.data.zero_()  # the next update
    made.save(4, learner.state, notes, due=True)  # it waits for its turn
    made.save(5, learner.state, notes, due=False)
    assert saved(store) == []
    store.go.set()
    made.wait()
    assert saved(store) == ["update-000002"]
    made.save(6, learner.state, notes, due=False)  # the one that was due at 4
    made.wait()
    assert saved(store) == ["update-000002", "update-000006"]
    made = states(store)
    found = made.load(Small(3, 0), 2)  # type: ignore[arg-type]
    assert found is not None and torch.equal(found["learner"]["parameters"]["0.weight"], before)


def test_an_error_of_saving_comes_up_and_the_last_state_stays(tmp_path: Path) -> None:
    store = Slow(str(tmp_path))
    store.go.set()
    made, learner = states(store), Small(1, 1)
    save(made, 2, learner)
    store.error = True
    made.save(4, learner.state, dict, due=True)
    with pytest.raises(RetryableError, match="the store is away"):
        made.wait()
    made.save(6, learner.state, dict, due=True)
    made._thread.submit(int).result()  # the thread has met the error
    with pytest.raises(RetryableError, match="the store is away"):
        made.save(7, learner.state, dict, due=False)
    found = states(Store(str(tmp_path))).load(Small(2, 0))  # type: ignore[arg-type]
    assert found is not None and found["update"] == 2


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"checkpoint": "d"}, "belongs to another checkpoint: c -> d"),
        ({"prompts": "q"}, "belongs to another prompts: p -> q"),
        ({"recipe": {"seed": 1, "training": {"updates": 9}}}, "seed: 0 -> 1"),
    ],
)
def test_the_state_of_something_else_is_refused(file_store: Store, about: dict[str, Any], words: str) -> None:
    save(states(file_store), 2, Small(1, 1))
    with pytest.raises(InputError, match=words):
        states(file_store, **about).load(Small(1, 0))  # type: ignore[arg-type]


def test_every_difference_is_named() -> None:
    was = {"seed": 0, "a": {"b": 1, "c": {}}, "training": {"updates": 4, "lora": None, "threads": 1}, "gate": {"x": 1}}
    now = {"seed": 0, "a": {"b": 2, "c": {"d": 3}}, "training": {"updates": 6, "lora": {"rank": 2}, "threads": 2}}
    refuse_changes(was, was | {"training": {"updates": 6, "lora": None, "threads": 3}, "gate": {}}, where="w", done=4)
    with pytest.raises(InputError) as error:
        refuse_changes(was, now, where="w", done=7)
    for words in ("a.b: 1 -> 2", "a.c.d: absent -> 3", "training.lora.rank: absent -> 2", "updates: 4 -> 6, 7 done"):
        assert words in str(error.value)
    assert "threads" not in str(error.value) and "gate" not in str(error.value)


def ranks(world: int, store: Store, action: str) -> None:
    """`action` in as many processes, each with its part of the network."""
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.unit.test_state", store.uri(), action]
    started = [
        subprocess.Popen(
            command, env=os.environ | group | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for one in started:
        _, errors = one.communicate(timeout=120)
        assert one.returncode == 0, errors


def test_a_network_in_parts_comes_back_at_other_world_sizes(file_store: Store) -> None:
    file_store.make_root()
    ranks(2, file_store, "save")
    index = file_store.read_json("run/state/update-000003/state.json")["tensors"]
    assert [len(one["chunks"]) for name, one in index.items() if name.endswith(("0.weight", "#0/exp_avg"))] == [2, 2]
    ranks(3, file_store, "load")
    alone = Small(2, 0)
    found = states(file_store).load(alone)  # type: ignore[arg-type]
    assert found is not None
    alone.restore(found["learner"])
    expected = Small(1, 2).whole()
    assert all(torch.allclose(one, expected[name], rtol=0, atol=1e-6) for name, one in alone.whole().items())
    saved_digest = json.loads(file_store.read_bytes("digest.json"))
    assert {name: one.tolist() for name, one in alone.whole().items()} == saved_digest, "to the last bit"


def act(store: Store, action: str) -> None:
    with Processes() as processes:
        made = States(store, "run", processes, KeepConfig(), ABOUT)
        if action == "save":
            learner = Small(1, 2, sharded=True)
            made.save(3, learner.state, lambda: {"metrics": []}, due=True)
            whole = {name: one.tolist() for name, one in learner.whole().items()}  # while the thread writes
            made.wait()
            if processes.first:
                store.write_json("digest.json", whole)
            return
        learner = Small(2, 0, sharded=True)
        found = made.load(learner)  # type: ignore[arg-type]
        assert found is not None
        learner.restore(found["learner"])
        assert isinstance(learner.optimizer.state_dict()["state"][0]["exp_avg"], DTensor)
        assert {name: one.tolist() for name, one in learner.whole().items()} == store.read_json("digest.json")
        made.save(4, learner.state, lambda: {"metrics": []}, due=True)
        made.wait()


if __name__ == "__main__":
    act(Store(sys.argv[1]), sys.argv[2])
