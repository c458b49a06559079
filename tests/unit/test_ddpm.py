"""The DDPM schedule against diffusers' own, for every setting that it reads."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler

from mar_grpo.diffusion.ddpm import DdpmSchedule
from mar_grpo.errors import InputError


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SETTINGS: list[dict[str, Any]] = [
    *(
        {"beta_schedule": schedule, "prediction_type": prediction}
        for schedule, prediction in product(
            ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"), ("epsilon", "v_prediction", "sample")
        )
    ),
    *({"timestep_spacing": spacing, "clip_sample": False} for spacing in ("leading", "trailing", "linspace")),
    *({"variance_type": kind, "steps_offset": 1} for kind in ("fixed_small", "fixed_small_log", "fixed_large")),
    {"clip_sample_range": 0.5, "beta_start": 0.00085, "beta_end": 0.012},
    {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"},
    {"num_train_timesteps": 8, "trained_betas": [0.01 * (i + 1) for i in range(8)], "clip_sample": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(map(str, settings.values()))[:60])
def test_steps_are_those_of_diffusers(settings: dict[str, Any]) -> None:
    theirs = DDPMScheduler(**settings)
    theirs.set_timesteps(5)
    ours = DdpmSchedule.from_config(dict(theirs.config), 5)
    assert ours.timesteps.tolist() == theirs.timesteps.tolist()
    torch.testing.assert_close(ours.alphas_cumprod, theirs.alphas_cumprod, atol=1e-6, rtol=1e-5)
    x, prediction = draw(3, 4, 2, 2), 0.5 * draw(3, 4, 2, 2, seed=1)
    for j, t in enumerate(theirs.timesteps):
        after = theirs.step(prediction, int(t), x, generator=torch.Generator().manual_seed(j))
        torch.testing.assert_close(
            ours.predicted_sample(j, x, prediction), after.pred_original_sample, atol=1e-4, rtol=1e-3
        )
        found = ours.step(j, x, prediction, draw(3, 4, 2, 2, seed=j))
        torch.testing.assert_close(found, after.prev_sample, atol=1e-4, rtol=1e-3)


def test_last_step_of_the_small_variance_is_not_scored() -> None:
    schedule = DdpmSchedule({"steps_offset": 1}, 4)
    assert [schedule.stochastic(j) for j in range(4)] == [True, True, True, False]
    mean, std = schedule.transition(3, draw(2, 4), draw(2, 4, seed=1))
    assert std == 0.0
    assert torch.equal(schedule.step(3, draw(2, 4), draw(2, 4, seed=1), draw(2, 4, seed=2)), mean)


def test_index_tensor_equals_integers_in_float32() -> None:
    schedule = DdpmSchedule({"clip_sample_range": 2.0}, 6)
    steps, x, prediction = torch.tensor([5, 0, 2]), draw(3, 5, 8).bfloat16(), draw(3, 5, 8, seed=1).bfloat16()
    mean, std = schedule.transition(steps, x, prediction)
    assert mean.dtype == torch.float32
    for row, j in enumerate(steps.tolist()):
        one_mean, one_std = schedule.transition(j, x[row].float(), prediction[row].float())
        torch.testing.assert_close(mean[row], one_mean)
        assert float(std[row]) == pytest.approx(one_std)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_training_target_is_what_sampling_reads(prediction_type: str) -> None:
    schedule = DdpmSchedule({"prediction_type": prediction_type, "clip_sample": False}, 10)
    clean, noise = draw(3, 8), draw(3, 8, seed=1)
    for j in (0, 4, 9):
        level = (schedule.timestep(j) + 0.5) / 1000
        x_t, t, target = schedule.training_pair(clean, noise, level.expand(3))
        assert t.tolist() == [float(schedule.timestep(j))] * 3
        torch.testing.assert_close(schedule.predicted_sample(j, x_t, target), clean, atol=1e-4, rtol=1e-3)
    assert schedule.training_pair(clean, noise, torch.ones(3))[1].tolist() == [999.0] * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"beta_shedule": "linear"}, "unknown key 'beta_shedule'"),
        ({"beta_schedule": "laplace"}, "beta_schedule = 'laplace'"),
        ({"variance_type": "learned_range"}, "variance_type = 'learned_range'"),
        ({"prediction_type": "flow"}, "prediction_type = 'flow'"),
        ({"thresholding": True}, "thresholding = True"),
        ({"_class_name": "PNDMScheduler"}, "_class_name is 'PNDMScheduler'"),
        ({"trained_betas": [0.1, 0.2]}, "trained_betas has 2 values"),
        ({"steps_offset": 250}, "steps_offset = 250"),
        ({"num_train_timesteps": 3}, "4 diffusion steps"),
        (
            {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
            "rescale_betas_zero_snr with prediction_type",
        ),
    ],
)
def test_wrong_configs_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DdpmSchedule(config, 4)
