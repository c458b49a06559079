"""Steps without KFP: wrong input is refused before anything is made, and promotion does only what the gate said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mar_grpo import steps
from mar_grpo.documents import DocumentRef, GateDecision, GateRule, write_document
from mar_grpo.errors import InputError
from mar_grpo.models.checkpoint import publish_checkpoint
from mar_grpo.runs import WORK, Run
from mar_grpo.store import Store


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WORK, str(tmp_path / "work"))
    return tmp_path / "work"


def cut(folder: Path) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_family(folder: Path) -> None:
    path = folder / "model_index.json"
    path.write_text(path.read_text().replace("NOVAPipeline", "StableDiffusionPipeline"))


def other_shape(folder: Path) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(path.read_text().replace("mlp_d2w16", "mlp_d2w32"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (shutil.rmtree, "does not exist"),
        (cut, "diffusion_pytorch_model.safetensors"),
        (other_family, "StableDiffusionPipeline"),
        (other_shape, "shape"),
    ],
)
def test_a_wrong_checkpoint_stops_the_run_before_it_begins(
    damage: Callable[[Path], None], named: str, small_checkpoint: Path, short_recipe: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small_checkpoint, tmp_path / "checkpoint"))
    damage(folder)
    with pytest.raises(InputError, match=named):
        steps.validate_inputs(short_recipe, f"file://{tmp_path}/store", overrides=[f"checkpoint.uri={folder}"])
    assert Store(f"file://{tmp_path}/store").list() == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("sampling.ar_steps=65", "sampling.ar_steps"),
        ("evaluation_sampling.ar_steps=65", "evaluation_sampling.ar_steps"),
        ("rewards.components={no_such_module:score: 1.0}", "no_such_module"),
        ("checkpoint.sha256=" + "a" * 64, "digest"),
    ],
)
def test_a_recipe_that_does_not_fit_the_checkpoint_is_refused(
    override: str, named: str, short_recipe: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=named):
        steps.validate_inputs(short_recipe, f"file://{tmp_path}/store", overrides=[override])
    assert Store(f"file://{tmp_path}/store").list() == []


def test_a_missing_bucket_is_refused_and_not_made(short_recipe: str, s3_environment: dict[str, str]) -> None:
    with pytest.raises(InputError, match="bucket"):
        steps.validate_inputs(short_recipe, "s3://no-such-bucket")
    with pytest.raises(InputError, match="bucket"):
        Store("s3://no-such-bucket").list()


def test_wrong_keys_are_refused(
    short_recipe: str, s3_store: Store, s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(InputError, match="AWS_SECRET_ACCESS_KEY"):
        steps.validate_inputs(short_recipe, s3_store.uri())


def test_equal_recipes_are_one_run_and_fresh_begins_anew(short_recipe: str, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/store"
    run = steps.validate_inputs(short_recipe, place)
    steps.prompt_data(run)
    assert steps.validate_inputs(short_recipe, place).uri == run.uri
    assert [name for name, _ in run.records()] == ["prompt_data"]
    assert steps.locate_run(short_recipe, place, ["seed=1"])[0].name.startswith("short-seed1-")
    steps.validate_inputs(short_recipe, place, fresh=True)
    assert run.records() == []


def test_a_prompt_file_that_changed_is_read_anew(short_recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    line = {"tag": "single_object", "include": [{"class": "circle", "count": 1}], "prompt": "a photo of a circle"}
    path.write_text(json.dumps(line) + "\n")
    recipe = json.dumps(json.loads(short_recipe) | {"data": {"train": str(path), "evaluation_prompts": 12}})
    run = steps.validate_inputs(recipe, f"file://{tmp_path}/store")
    first = steps.prompt_data(run)
    assert steps.prompt_data(run) == first
    path.write_text(json.dumps(line | {"prompt": "a picture of a circle"}) + "\n")
    second = steps.prompt_data(run)
    assert second["train"].sha256 != first["train"].sha256


def decision(run: Run, candidate: str, promote: bool) -> DocumentRef:
    rule = GateRule(name="accuracy_rose", passed=promote, measured=0.1, threshold=0.05, detail="")
    made = GateDecision(candidate=candidate, incumbent="b" * 64, rules=(rule,), promote=promote)
    return write_document(run.store, f"{run.prefix}/gate-{promote}.json", made)


def test_promotion_does_what_the_gate_said_and_remembers_whom_it_replaced(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    store.make_root()
    published = []
    for number in (1, 2):
        run = Run(store, f"run-{number}")
        checkpoint = publish_checkpoint(small_checkpoint, store, f"{run.prefix}/checkpoint", step=number)
        published.append(checkpoint)
        with pytest.raises(InputError, match="did not promote"):
            steps.promote(run, decision(run, checkpoint.sha256, False), checkpoint)
        with pytest.raises(InputError, match="did not promote"):
            steps.promote(run, decision(run, "c" * 64, True), checkpoint)
        yes = decision(run, checkpoint.sha256, True)
        for _ in range(2):  # done twice, as after an interruption
            assert steps.promote(run, yes, checkpoint).sha256 == checkpoint.sha256
    history = [store.read_json(f"champions/{checkpoint.sha256}.json") for checkpoint in published]
    assert history[0]["replaces"] is None
    assert history[1]["replaces"]["sha256"] == published[0].sha256


def test_the_exit_task_writes_down_what_stopped_the_run(short_recipe: str, tmp_path: Path, work: Path) -> None:
    place = f"file://{tmp_path}/store"
    run = steps.validate_inputs(short_recipe, place)
    failure = {"step": "grpo_training", "error": "what is wrong", "exit_code": 3}
    run.store.write_json(f"{run.prefix}/failure.json", failure)
    (run.work() / "launch").mkdir(parents=True)
    assert steps.finish(short_recipe, place, [], "FAILED", "a task failed")["failure"] == failure
    assert run.work().exists(), "logs of a run that failed stay"
    assert run.store.read_json(f"{run.prefix}/outcome.json")["state"] == "FAILED"
    steps.validate_inputs(short_recipe, place)
    assert "failure" not in steps.finish(short_recipe, place, [], "SUCCEEDED", "")
    assert not run.work().exists()
