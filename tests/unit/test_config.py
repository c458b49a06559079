"""The recipe: every option is a decision, and what is wrong or does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
rewards.components
algorithm.scored_ar_steps algorithm.noisiest_diffusion_steps algorithm.scored_diffusion_steps algorithm.trained
algorithm.scope algorithm.advantage.scale algorithm.advantage.clip algorithm.trajectories.count
algorithm.trajectories.share algorithm.trajectories.include_rollout algorithm.selection.mode
algorithm.selection.threshold algorithm.kl
optimizer.kind optimizer.learning_rate optimizer.beta1 optimizer.beta2 optimizer.weight_decay optimizer.warmup_updates
optimizer.max_grad_norm
training.updates training.prompts_per_update training.group_size training.micro_batch training.processes
training.threads training.save_every training.held_out_every training.held_out_prompts training.max_relaunches
training.health.patience training.health.compare_every
evaluation.samples_per_prompt evaluation.seed
evaluation_sampling.ar_steps evaluation_sampling.diffusion_steps evaluation_sampling.guidance_scale
evaluation_sampling.guidance_renorm evaluation_sampling.guidance_schedule evaluation_sampling.noise_level
evaluation_sampling.temperature evaluation_sampling.batch_size
gate.score gate.standard_errors gate.min_prompts gate.min_diversity_ratio gate.max_degenerate_rise gate.flat_deviation
gate.saturated_share gate.max_unusual_share
"""


def options(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from options(field.annotation, f"{prefix}{name}.")
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
    "algorithm.kl=-0.1": "algorithm.kl: Input should be greater than or equal to 0",
    "algorithm.scope=some": "algorithm.scope: Input should be 'committed' or 'unknown'",
    "algorithm.trained=head": "algorithm.trained: Input should be 'trunk' or 'condition'",
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
    "training.prompts_per_update=33": "training.prompts_per_update: 33 prompts cannot be shared evenly by 2 processes",
    "training.micro_batch=4": "training: micro_batch 4 cannot hold one group of group_size 8",
    "algorithm.scored_ar_steps=13": "algorithm.scored_ar_steps 13 and sampling.ar_steps 12 do not fit",
    "algorithm.scored_diffusion_steps=11": "algorithm.scored_diffusion_steps 11 and sampling.diffusion_steps 10",
    "algorithm.noisiest_diffusion_steps=11": "algorithm.noisiest_diffusion_steps 11 and sampling.diffusion_steps 10",
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
    fine = ["sampling.guidance_renorm=0.5", "algorithm.trajectories.count=0"]
    assert load_recipe('{"name": "a"}', fine).sampling.guidance_renorm == 0.5
    with pytest.raises(InputError, match="ties the tokens"):
        load_recipe('{"name": "a"}', [*fine, "algorithm.scope=unknown"])
    with pytest.raises(InputError, match=r"scored_diffusion_steps 4 and algorithm\.noisiest_diffusion_steps 3"):
        load_recipe('{"name": "a"}', ["algorithm.noisiest_diffusion_steps=3", "algorithm.scored_diffusion_steps=4"])
    assert load_recipe('{"name": "a"}', ["training.prompts_per_update=33", "training.processes=3"])
    own = ['rewards.components={"my.scorers:fun": 1}', "gate.score=heatmap/strict"]
    assert load_recipe('{"name": "a"}', own).gate.score == "heatmap/strict"


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
    with pytest.raises(InputError, match=r"scored_diffusion_steps 6 and sampling\.diffusion_steps 5 do not fit"):
        load_recipe('{"name": "a"}', ["sampling.diffusion_steps=ddim5", "algorithm.scored_diffusion_steps=6"])


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
