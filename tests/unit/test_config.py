"""The recipe: every option is a decision, and what is wrong or does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from mar_grpo.config import Recipe, load_recipe, parse, read_mapping, recipe_names
from mar_grpo.errors import InputError
from mar_grpo.training.sft_run import SftRecipe

OPTIONS = """
name seed checkpoint.uri checkpoint.sha256
data.train data.evaluation data.train_prompts data.evaluation_prompts data.tag_weights data.separate_by data.seed
data.samples_per_shard data.cache_bytes
sampling.ar_steps sampling.diffusion_steps sampling.guidance_scale sampling.guidance_renorm sampling.guidance_schedule
sampling.noise_level sampling.temperature sampling.batch_size
rewards.components rewards.device
algorithm.preset algorithm.scored_ar_steps.count algorithm.scored_ar_steps.which algorithm.scored_ar_steps.draw
algorithm.scored_diffusion_steps.count algorithm.scored_diffusion_steps.which algorithm.scored_diffusion_steps.draw
algorithm.trained algorithm.scope algorithm.likelihood_guidance algorithm.deviation algorithm.variance_floor
algorithm.reduction algorithm.per algorithm.inner_updates algorithm.clip algorithm.advantage.combine
algorithm.advantage.baseline algorithm.advantage.scale algorithm.advantage.equal_groups algorithm.advantage.clip
algorithm.trajectories.mode algorithm.trajectories.count algorithm.trajectories.share algorithm.trajectories.unit
algorithm.trajectories.pick algorithm.trajectories.guidance algorithm.trajectories.include_rollout
algorithm.selection.mode algorithm.selection.threshold algorithm.selection.unit algorithm.selection.first_ar_step
algorithm.kl.kind algorithm.kl.coefficient algorithm.kl.reference algorithm.kl.refresh_every
optimizer.kind optimizer.learning_rate optimizer.head_learning_rate optimizer.head_ema_decay optimizer.beta1
optimizer.beta2 optimizer.weight_decay optimizer.warmup_updates optimizer.max_grad_norm
training.updates training.prompts_per_update training.group_size training.micro_batch training.processes
training.threads training.save_every training.keep.last training.keep.best training.keep.every
training.held_out_every training.held_out_prompts training.max_relaunches training.stop_grace_seconds
training.store_patience_seconds
training.health.patience training.health.compare_every training.lora.rank training.lora.alpha training.lora.targets
training.parallel training.precision training.activation_checkpointing
evaluation.samples_per_prompt evaluation.seed
evaluation_sampling.ar_steps evaluation_sampling.diffusion_steps evaluation_sampling.guidance_scale
evaluation_sampling.guidance_renorm evaluation_sampling.guidance_schedule evaluation_sampling.noise_level
evaluation_sampling.temperature evaluation_sampling.batch_size
gate.score gate.standard_errors gate.min_prompts gate.min_diversity_ratio gate.max_degenerate_rise gate.flat_deviation
gate.saturated_share gate.max_unusual_share
"""


def options(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        parts = [kind for kind in kinds if issubclass(kind, BaseModel)]  # also of `Part | None`
        if parts:
            yield from options(parts[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def test_a_new_option_is_a_decision() -> None:
    """Think twice before this list grows: every option is explained, tested and kept for years."""
    assert [name for name, _ in options(Recipe)] == OPTIONS.split()


def test_every_option_has_a_default_but_the_name() -> None:
    assert [name for name, field in options(Recipe) if field.is_required()] == ["name"]


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert load_recipe(recipe.model_dump_json()) == recipe


def test_the_sft_recipes_that_ship_load() -> None:
    folder = Path(__file__).parents[2] / "mar_grpo" / "recipes"
    names = sorted(path.stem for path in folder.glob("*-sft.yaml"))
    assert names and not set(names) & set(recipe_names())
    for name in names:
        assert parse(SftRecipe, *read_mapping(name, [])).name == name


REFUSED = {
    # what does not exist, or is not a value
    "training.updatez=3": "training.updatez: unknown key",
    "trainings.updates=3": "trainings: unknown key",
    "algorithm.trajectories.s=3": "algorithm.trajectories.s: unknown key",
    "training.updates=0": "training.updates: Input should be greater than 0",
    "training.updates=many": "training.updates: Input should be a valid integer",
    "training.group_size=1": "training.group_size: Input should be greater than or equal to 2",
    "optimizer.learning_rate=.nan": "optimizer.learning_rate: Input should be a finite number",
    "optimizer.learning_rate=-1": "optimizer.learning_rate: Input should be greater than 0",
    "sampling.guidance_scale=.inf": "sampling.guidance_scale: Input should be a finite number",
    "algorithm.kl.coefficient=-0.1": "algorithm.kl.coefficient: Input should be greater than 0",
    "algorithm.kl=0.0": "algorithm.kl: Input should be a valid dictionary",
    "algorithm.scope=some": "algorithm.scope: Input should be 'committed' or 'unknown'",
    "algorithm.trained=vae": "algorithm.trained: Input should be 'trunk', 'condition', 'head' or 'both'",
    "training.lora.rank=0": "training.lora.rank: Input should be greater than 0",
    "training.lora.targets=[]": "training.lora.targets: Tuple should have at least 1 item",
    "optimizer.head_ema_decay=1": "optimizer.head_ema_decay: Input should be less than 1",
    "name=My run": "name: String should match pattern",
    "seed=-1": "seed: Input should be greater than or equal to 0",
    "rewards.components={}": "rewards.components: at least one reward component is needed",
    "rewards.components={heatmap/graded: 0}": "rewards.components: the weight of 'heatmap/graded' must be",
    "rewards.components={hps: 1}": "rewards.components: unknown reward 'hps'",
    # what does not fit together
    "rewards.components={templates/strict: 1}": "'templates/strict' is the held-out judge",
    "gate.score=heatmap/strict": "gate.score 'heatmap/strict' and rewards.components do not fit",
    "sampling.noise_level=0": "sampling.noise_level 0 (the ODE) and the policy gradient do not fit",
    "sampling.diffusion_steps=1": "sampling.diffusion_steps 1 and the policy gradient do not fit",
    "training.processes=257": "training.processes 257: an update has 256 images, one process had none",
    "training={parallel: fsdp, processes: 3}": "training.parallel 'fsdp' and 256 images an update do not fit",
    "algorithm.scored_ar_steps.count=13": "algorithm.scored_ar_steps.count 13 and sampling.ar_steps 12 do not fit",
    "algorithm.scored_diffusion_steps.count=11": "algorithm.scored_diffusion_steps.count 11 and sampling",
    "algorithm.scored_ar_steps={count: 2, draw: ar_step}": "algorithm.scored_ar_steps.draw 'ar_step' means nothing",
    "algorithm.scope=committed": "algorithm: selection.mode 'delta' and scope 'committed' do not fit",
    "algorithm.clip=0.2": "algorithm: clip and inner_updates 1 do not fit",
    "algorithm.kl.reference=adapter_off": "algorithm.kl.reference 'adapter_off' and training.lora null do not fit",
    "optimizer.head_learning_rate=0.1": "optimizer.head_learning_rate and algorithm.trained 'trunk' do not fit",
    "optimizer.head_ema_decay=0.9": "optimizer.head_ema_decay and algorithm.trained 'trunk' do not fit",
    "sampling.diffusion_steps=0": "sampling.diffusion_steps: Input should be greater than 0",
    "sampling.diffusion_steps=1.5": "sampling.diffusion_steps: Input should be a number of steps or a respacing",
    "sampling.diffusion_steps=ddim600": "sampling.diffusion_steps: no integer stride keeps 600 of 1000 steps",
    "sampling.temperature=0": "sampling.temperature: Input should be greater than 0",
    "sampling.guidance_schedule=cosine": "sampling.guidance_schedule: Input should be 'constant' or 'linear'",
    "sampling.guidance_renorm=0.5": "sampling.guidance_renorm below 1 ties the tokens",
    # overrides that are none
    "training.updates": "an override has the form key.sub=value",
    "=3": "an override has the form key.sub=value",
    "name.first=a": "name holds a value, not keys",
    "seed={": "the value of the override is not YAML",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_wrong_is_refused_by_name(override: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe('{"name": "a"}', [override])
    assert REFUSED[override] in str(error.value)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_parts_are_judged_together() -> None:
    """Each of these is right where the other is as well."""
    fine = ["sampling.guidance_renorm=0.5", "algorithm.scope=committed", "algorithm.selection.mode=off"]
    fine += ["algorithm.trajectories.mode=off"]
    assert load_recipe('{"name": "a"}', fine).sampling.guidance_renorm == 0.5
    with pytest.raises(InputError, match="ties the tokens"):
        load_recipe('{"name": "a"}', [*fine, "algorithm.scope=unknown"])
    with pytest.raises(InputError, match="ties the tokens"):
        load_recipe('{"name": "a"}', [*fine, "algorithm.trajectories.mode=per_step"])
    lora = load_recipe('{"name": "a"}', ["training.lora={}", "algorithm.kl.reference=adapter_off"]).training.lora
    assert lora is not None and lora.rank == 8
    for part in ("head", "both"):
        changes = [f"algorithm.trained={part}", "optimizer.head_learning_rate=1e-5", "optimizer.head_ema_decay=0.9"]
        assert load_recipe('{"name": "a"}', changes)
    assert load_recipe('{"name": "a"}', ["training.prompts_per_update=33", "training.micro_batch=5"])
    own = ['rewards.components={"my.scorers:fun": 1}', "gate.score=heatmap/strict"]
    assert load_recipe('{"name": "a"}', own).gate.score == "heatmap/strict"


@pytest.mark.parametrize("preset", ["released", "released_harmon"])
def test_a_preset_fits_the_default_sampling(preset: str) -> None:
    algorithm = load_recipe('{"name": "a"}', [f"algorithm.preset={preset}"]).algorithm
    assert algorithm.scored_ar_steps.count == 12 and algorithm.kl.kind == "mean_k3"


def test_overrides_change_what_they_name() -> None:
    plain = load_recipe('{"name": "a"}')
    changed = load_recipe('{"name": "a"}', ["training.updates=7", "optimizer.learning_rate=1e-3", "checkpoint.uri=/x"])
    assert (changed.training.updates, changed.optimizer.learning_rate, changed.checkpoint.uri) == (7, 1e-3, "/x")
    assert changed.training.group_size == plain.training.group_size
    assert changed.digest != plain.digest


def test_evaluation_has_no_noise_unless_asked_for() -> None:
    assert load_recipe('{"name": "a"}', ["evaluation_sampling.ar_steps=8"]).evaluation_sampling.noise_level == 0.0


def test_diffusion_steps_are_a_number_or_a_respacing() -> None:
    for given, kept, count in (("'10'", 10, 10), ("ddim5", "ddim5", 5), ("'3,4'", "3,4", 7)):
        sampling = load_recipe('{"name": "a"}', [f"sampling.diffusion_steps={given}"]).sampling
        assert (sampling.diffusion_steps, sampling.num_diffusion_steps) == (kept, count)
    with pytest.raises(InputError, match=r"scored_diffusion_steps\.count 6 and sampling\.diffusion_steps 5 do not"):
        load_recipe('{"name": "a"}', ["sampling.diffusion_steps=ddim5", "algorithm.scored_diffusion_steps.count=6"])


def test_the_digest_is_of_the_content() -> None:
    first = load_recipe('{"name": "a", "seed": 1, "training": {"updates": 3}}')
    second = load_recipe(json.dumps({"training": {"updates": 3}, "seed": 1, "name": "a"}))
    assert first.digest == second.digest and len(first.digest) == 64
    assert load_recipe('{"name": "a", "seed": 2, "training": {"updates": 3}}').digest != first.digest


FILES = {
    "list": (b"- a\n- b\n", "a recipe is a mapping"),
    "empty": (b"", "a recipe is a mapping"),
    "broken": (b"name: [a\n", "the recipe is not YAML"),
    "bytes": (b"name: \xff\n", "the recipe is not UTF-8"),
    "twice": (b"name: a\nseed: 1\nseed: 2\n", "the key 'seed' is given twice"),
    "twice below": (b"name: a\ntraining: {updates: 1, updates: 2}\n", "the key 'updates' is given twice"),
    "code": (b"name: !!python/object/apply:os.getcwd []\n", "the recipe is not YAML"),
    "no name": (b"seed: 1\n", "name: Field required"),
    "number as key": (b"name: a\n1: 2\n", "1"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_recipes_are_refused_by_place(tmp_path: Path, name: str) -> None:
    content, message = FILES[name]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_recipe(str(path))
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("source", ["no-such-recipe", "", "x" * 5000, "a\nb: c", "emoji/../emoji", "\0"])
def test_what_is_not_there_is_refused_with_what_is(source: str) -> None:
    with pytest.raises(InputError, match="there is no such recipe") as error:
        load_recipe(source)
    assert all(name in str(error.value) for name in recipe_names())
