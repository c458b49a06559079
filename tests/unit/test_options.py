"""The method's options: presets, what a given key does to them, and combinations that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from mar_grpo.algorithms.config import PRESETS, AlgorithmConfig, KlConfig
from mar_grpo.algorithms.selection import SelectionConfig
from mar_grpo.algorithms.trajectories import TrajectoryConfig


def config(**values: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(values)


def leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """("kl.kind", "gaussian") and so on."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{before}{key}.")
        else:
            yield before + key, value


def options(values: AlgorithmConfig) -> dict[str, Any]:
    return dict(leaves(values.model_dump()))


CORRECTED = options(AlgorithmConfig())
RELEASED = options(config(preset="released"))


def test_the_default_is_the_corrected_preset() -> None:
    assert options(config(preset="corrected")) == CORRECTED
    assert options(config(preset="released")) != CORRECTED


def test_the_presets_differ_in_these_options_and_no_other() -> None:
    """What is written down here is what the documentation of each option has to explain."""
    different = {key: value for key, value in RELEASED.items() if value != CORRECTED[key]}
    assert different == {
        "preset": "released",
        "scored_ar_steps.count": 12,
        "scored_diffusion_steps.count": 10,
        "scored_diffusion_steps.draw": "ar_step",
        "likelihood_guidance": "none",
        "deviation": "recorded",
        "reduction": "sum",
        "advantage.combine": "summed",
        "advantage.clip": None,
        "trajectories.unit": "pixel",
        "trajectories.guidance": "none",
        "trajectories.include_rollout": False,
        "selection.unit": "pixel",
        "selection.first_ar_step": 2,
        "kl.kind": "mean_k3",
    }
    harmon = options(config(preset="released_harmon"))
    assert {key: value for key, value in harmon.items() if value != RELEASED[key]} == {
        "preset": "released_harmon",
        "scored_diffusion_steps.draw": "update",
        "per": "token",
        "variance_floor": 1e-6,
        "trajectories.count": 5,
        "trajectories.guidance": "sampler",
    }


def test_each_key_of_the_released_preset_is_a_difference_or_pinned() -> None:
    """Pinned: the same in `corrected`, written down so that a change of the default cannot change it."""
    same = {key for key, value in leaves(PRESETS["released"]) if CORRECTED[key] == value}
    assert same == {"scope", "trajectories.mode", "trajectories.count", "trajectories.share", "selection.mode"}


@pytest.mark.parametrize("preset", ["released", "released_harmon"])
def test_a_key_that_is_given_overrides_the_preset_and_nothing_else(preset: str) -> None:
    before = options(config(preset=preset))
    changes: dict[str, Any] = {
        "reduction": "steps", "kl": {"coefficient": 0.5}, "trajectories": {"count": 7},
        "selection": {"mode": "absolute"}, "scored_ar_steps": {"which": "late"}, "advantage": {"scale": "batch"},
    }  # fmt: skip
    found = options(config(preset=preset, **changes))
    given = dict(leaves(changes))
    assert {key: value for key, value in found.items() if value != before[key]} == given
    assert options(config(preset=preset)) == before  # the table of presets is nobody's to change


def test_a_preset_survives_being_written_and_read() -> None:
    """Also where a given value is the default's: the whole model is dumped into checkpoints and runs."""
    for preset in PRESETS:
        made = config(preset=preset, per="element", kl={"kind": "gaussian"}, trajectories={"include_rollout": True})
        assert made.kl.kind == "gaussian" and made.per == "element" and made.trajectories.include_rollout
        assert AlgorithmConfig.model_validate(made.model_dump(mode="json")) == made


def test_a_part_given_as_a_model_stands_as_it_is() -> None:
    made = config(preset="released", kl=KlConfig(coefficient=0.5))
    assert made.kl == KlConfig(coefficient=0.5) and made.reduction == "sum"


@pytest.mark.parametrize(("part", "key"), [(SelectionConfig, "mode"), (TrajectoryConfig, "mode"), (KlConfig, "kind")])
def test_off_is_a_word_in_yaml(part: type[BaseModel], key: str) -> None:
    """YAML 1.1 makes a boolean of it."""
    read = yaml.safe_load(f"{key}: off")
    assert read == {key: False}
    assert getattr(part.model_validate(read), key) == "off"
    assert getattr(part.model_validate(yaml.safe_load(f'{key}: "off"')), key) == "off"
    with pytest.raises(ValidationError):
        part.model_validate(yaml.safe_load(f"{key}: on"))


def test_off_over_a_preset() -> None:
    read = yaml.safe_load("{preset: released, selection: {mode: off}, trajectories: {mode: off}, kl: {kind: off}}")
    made = AlgorithmConfig.model_validate(read)
    assert (made.selection.mode, made.trajectories.mode, made.kl.kind) == ("off", "off", "off")
    assert made.selection.unit == "pixel" and made.likelihood_guidance == "none"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scope": "committed"}, "selection.mode 'delta' and scope 'committed' do not fit"),
        ({"scope": "committed", "selection": {"mode": "absolute"}}, "selection.mode 'absolute' and scope 'committed'"),
        ({"preset": "released", "scope": "committed"}, "use selection.mode off or scope unknown"),
        ({"clip": 0.2}, "clip and inner_updates 1 do not fit"),
        ({"inner_updates": 2, "clip": 0.0}, "clip"),
        ({"inner_updates": 0}, "inner_updates"),
        ({"kl": {"reference": "adapter_off", "refresh_every": 5}}, "refresh_every and reference 'adapter_off'"),
        ({"kl": {"kind": "off", "refresh_every": 5}}, "kind 'off' and refresh_every or reference do not fit"),
        ({"kl": {"kind": "off", "reference": "adapter_off"}}, "kind 'off' and refresh_every or reference do not fit"),
        ({"kl": {"coefficient": 0.0}}, "kl.coefficient"),
        ({"kl": {"coefficient": float("inf")}}, "kl.coefficient"),
        ({"kl": 0.1}, "kl"),
        ({"preset": "official"}, "'corrected', 'released' or 'released_harmon'"),
        ({"trained": "vae"}, "'trunk', 'condition', 'head' or 'both'"),
        ({"variance_floor": -1.0}, "variance_floor"),
        ({"selection": {"threshold": 2.5}}, "selection.threshold"),
        ({"selection": {"first_ar_step": -1}}, "selection.first_ar_step"),
        ({"selection": {"mode": "none"}}, "'delta', 'absolute' or 'off'"),
        ({"advantage": {"clip": 0.0}}, "advantage.clip"),
        ({"noisiest_diffusion_steps": 3}, "noisiest_diffusion_steps"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**wrong)


def test_what_fits_is_taken() -> None:
    config(scope="committed", selection={"mode": "off"})
    config(inner_updates=2, clip=0.2)
    config(kl={"refresh_every": 5})
    config(kl={"reference": "adapter_off"})
