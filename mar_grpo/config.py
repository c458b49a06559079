"""The recipe: the one configuration of a run. Every part's model lives beside the code it configures."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.data.stream import DataConfig
from mar_grpo.errors import InputError
from mar_grpo.evaluation.benchmarks import EvaluationConfig
from mar_grpo.evaluation.gate import GateConfig
from mar_grpo.rewards.mix import RewardConfig
from mar_grpo.rollout import SamplingConfig
from mar_grpo.store import read_uri
from mar_grpo.training.config import TrainingConfig
from mar_grpo.training.optimization import OptimizerConfig

M = TypeVar("M", bound=BaseModel)


class CheckpointConfig(BaseModel):
    """Where the SFT checkpoint is: `package://NAME`, a folder or Checkpoint document by path, file:// or s3://."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = "package://emoji-nova"
    sha256: str | None = None


class EvaluationSampling(SamplingConfig):
    """Sampling of the finished policy: the ODE unless the recipe says otherwise."""

    noise_level: float = Field(0.0, ge=0, allow_inf_nan=False)


class Recipe(BaseModel):
    """Names everything that changes a number.

    Args:
        seed: of training: prompts, noise, orders. Evaluation and data have seeds of their own.
        sampling: how the policy samples in training; `evaluation_sampling` how it is evaluated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    seed: int = Field(0, ge=0)
    checkpoint: CheckpointConfig = CheckpointConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    rewards: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    evaluation_sampling: EvaluationSampling = EvaluationSampling()
    gate: GateConfig = GateConfig()

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if self.sampling.noise_level == 0:
            raise ValueError(
                "sampling.noise_level 0 (the ODE) and the policy gradient do not fit: without noise no transition has "
                "a density to score"
            )
        if self.sampling.num_diffusion_steps < 2:
            raise ValueError(
                "sampling.diffusion_steps 1 and the policy gradient do not fit: the last step has no noise"
            )
        for few, many, whole in (
            ("algorithm.scored_ar_steps", "sampling.ar_steps", self.sampling.ar_steps),
            ("algorithm.scored_diffusion_steps", "sampling.diffusion_steps", self.sampling.num_diffusion_steps),
        ):
            count = attrgetter(few)(self).count
            if count is not None and count > whole:
                raise ValueError(
                    f"{few}.count {count} and {many} {whole} do not fit: more cannot be scored than are made"
                )
        if self.algorithm.scored_ar_steps.draw == "ar_step":
            raise ValueError("algorithm.scored_ar_steps.draw 'ar_step' means nothing: it is transitions that are drawn")
        if self.sampling.guidance_renorm < 1 and (
            self.algorithm.scope == "unknown" or self.algorithm.trajectories.mode != "off"
        ):
            raise ValueError(
                "sampling.guidance_renorm below 1 ties the tokens that are drawn together, so it does not fit "
                "algorithm.scope 'unknown' or algorithm.trajectories, which draw others beside them"
            )
        head = [name for name in ("head_learning_rate", "head_ema_decay") if getattr(self.optimizer, name) is not None]
        if head and self.algorithm.trained not in ("head", "both"):
            raise ValueError(
                f"optimizer.{head[0]} and algorithm.trained {self.algorithm.trained!r} do not fit: the head is frozen"
            )
        if self.algorithm.kl.reference == "adapter_off" and self.training.lora is None:
            raise ValueError(
                "algorithm.kl.reference 'adapter_off' and training.lora null do not fit: no adapter can be left out"
            )
        images, processes = self.training.prompts_per_update * self.training.group_size, self.training.processes
        if images < processes:
            raise ValueError(f"training.processes {processes}: an update has {images} images, one process had none")
        if self.training.parallel == "fsdp" and images % processes:
            raise ValueError(
                f"training.parallel 'fsdp' and {images} images an update do not fit: sharded processes call the policy "
                f"together, so that each of {processes} must have as many images"
            )
        judge = self.gate.score.split("/")[0]
        if judge in {name.split("/")[0] for name in self.rewards.components}:
            raise ValueError(
                f"gate.score {self.gate.score!r} and rewards.components do not fit: a judge that was trained on "
                "cannot decide about promotion"
            )
        return self

    @property
    def digest(self) -> str:
        """sha256 over the canonical JSON of every field, 64 hex digits."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def recipe_names() -> list[str]:
    """Recipes that ship with the package (those of SFT are not runs of the pipeline)."""
    folder = resources.files("mar_grpo.recipes")
    names = [Path(item.name).stem for item in folder.iterdir() if item.name.endswith(".yaml")]
    return sorted(name for name in names if not name.endswith("-sft"))


def load_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by name, path, URI or JSON text, with `key.sub=value` overrides (values are read as YAML).

    Raises:
        InputError: no such recipe, not YAML, an unknown key, or parts that do not fit together; names the key.
    """
    return parse(Recipe, *read_mapping(source, overrides))


def read_mapping(source: str, overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The recipe as a dict, and its place for messages."""
    where = source if len(source) < 200 else "recipe"
    named = resources.files("mar_grpo.recipes") / f"{source}.yaml"
    if source.lstrip().startswith("{"):
        text = source
    elif re.fullmatch(r"[\w-]{1,64}", source) and named.is_file():
        text = named.read_text(encoding="utf-8")
    elif "://" in source or os.path.isfile(source):
        text = _text(read_uri(source), where)
    else:
        hint = f"give a path, a URI, or one of {', '.join(recipe_names())}"
        raise InputError("there is no such recipe", where=where, hint=hint)
    try:
        content = yaml.load(text, Loader=_Strict)
    except yaml.YAMLError as error:
        raise InputError(f"the recipe is not YAML: {' '.join(str(error).split())}", where=where) from error
    if not isinstance(content, dict):
        raise InputError("a recipe is a mapping of keys to values", where=where)
    for override in overrides:
        _override(content, override)
    return content, where


def parse(model: type[M], content: dict[str, Any], where: str) -> M:
    """Validate; the first problem becomes one InputError that names its key."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        raise InputError(f"{key}: {what}" if key else what, where=where, hint="see `mar-grpo recipe show`") from error


class _Strict(yaml.SafeLoader):
    """YAML in which a key may be given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            problem = f"the key {twice[0]!r} is given twice"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"the recipe is not UTF-8: {error}", where=where) from error


def _override(content: dict[str, Any], override: str) -> None:
    path, found, value = override.partition("=")
    if not found or not path:
        raise InputError("an override has the form key.sub=value", where=override)
    *parents, last = path.split(".")
    place = content
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise InputError(f"{parent} holds a value, not keys", where=override)
    try:
        place[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError("the value of the override is not YAML", where=override) from error
