"""The flow schedule: exact on Gaussians, float32 throughout, diffusers' sigmas, errors by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from mar_grpo.diffusion.flow import FlowSchedule
from mar_grpo.diffusion.gaussian import log_prob
from mar_grpo.diffusion.guidance import guide
from mar_grpo.errors import InputError


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def final_variance(schedule: FlowSchedule, data_variance: float) -> float:
    """Variance after all steps for N(0, data_variance) data and the exact velocity, which is linear in x."""
    variance = 1.0
    one = torch.ones(1)
    for j in range(schedule.num_steps):
        s = float(schedule.sigmas[j])
        velocity = (s - (1 - s) * data_variance) / ((1 - s) ** 2 * data_variance + s**2)
        mean, std = schedule.transition(j, one, velocity * one)
        variance = float(mean) ** 2 * variance + std**2
    return variance


@pytest.mark.parametrize("eta", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("data_variance", [0.25, 1.0, 2.0])
def test_ode_and_sde_end_at_the_data(eta: float, data_variance: float) -> None:
    coarse = abs(final_variance(FlowSchedule(250, eta=eta), data_variance) / data_variance - 1)
    fine = abs(final_variance(FlowSchedule(1000, eta=eta), data_variance) / data_variance - 1)
    assert fine < 0.01
    assert fine < coarse  # what is left is the step size


def test_ode_reaches_a_point_exactly() -> None:
    target, x = draw(5, 8), draw(5, 8, seed=1)
    schedule = FlowSchedule(4, eta=0.0)
    for j in range(4):
        velocity = (x - target) / schedule.sigmas[j]
        assert torch.equal(schedule.ode_step(j, x, velocity), schedule.transition(j, x, velocity)[0])
        x = schedule.step(j, x, velocity, draw(5, 8, seed=2))
    torch.testing.assert_close(x, target)
    assert not any(schedule.stochastic(j) for j in range(4))


def test_last_step_has_no_noise_unless_asked() -> None:
    schedule, published = FlowSchedule(5), FlowSchedule(5, last_step_deterministic=False)
    assert [schedule.stochastic(j) for j in range(5)] == [True] * 4 + [False]
    assert all(published.stochastic(j) for j in range(5))
    assert schedule.std[:4] == published.std[:4]
    x, velocity = draw(3, 8), draw(3, 8, seed=1)
    mean, std = schedule.transition(4, x, velocity)
    assert std == 0.0
    assert torch.equal(mean, schedule.ode_step(4, x, velocity))
    with pytest.raises(ValueError, match="must not be scored"):
        log_prob(x, mean, std)


def test_log_prob_is_the_normal_density() -> None:
    x, mean = draw(4, 6), draw(4, 6, seed=1)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x)
    torch.testing.assert_close(log_prob(x, mean, 0.3), expected)
    torch.testing.assert_close(log_prob(x, mean, torch.full((4, 1), 0.3)), expected)


def test_arithmetic_is_float32_under_half_precision() -> None:
    schedule = FlowSchedule(25)
    x, velocity = draw(4, 6).bfloat16(), draw(4, 6, seed=1).bfloat16()
    for j in (0, 12, 24):
        mean, _ = schedule.transition(j, x, velocity)
        assert mean.dtype == torch.float32
        assert torch.equal(mean, schedule.transition(j, x.float(), velocity.float())[0])
    assert log_prob(x, mean.bfloat16(), 0.1).dtype == torch.float32
    assert torch.equal(guide(x, velocity, 5.0), guide(x.float(), velocity.float(), 5.0))


def test_index_tensor_equals_integers() -> None:
    schedule = FlowSchedule(6)
    steps, x, velocity = torch.tensor([4, 0, 2]), draw(3, 5, 8), draw(3, 5, 8, seed=1)
    mean, std = schedule.transition(steps, x, velocity)
    samples = schedule.predicted_sample(steps, x, velocity)
    assert schedule.timestep(steps).tolist() == [float(schedule.timestep(j)) for j in (4, 0, 2)]
    for row, j in enumerate(steps.tolist()):
        one_mean, one_std = schedule.transition(j, x[row], velocity[row])
        torch.testing.assert_close(mean[row], one_mean)
        assert float(std[row]) == pytest.approx(one_std)
        torch.testing.assert_close(samples[row], schedule.predicted_sample(j, x[row], velocity[row]))


@pytest.mark.parametrize("num_steps", [1, 4, 25])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sigmas_are_those_of_diffusers(num_steps: int, shift: float) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.set_timesteps(num_steps)
    ours = FlowSchedule.from_config(dict(theirs.config), num_steps)
    torch.testing.assert_close(ours.sigmas, theirs.sigmas, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.timesteps, theirs.timesteps, atol=1e-3, rtol=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_training_pair(shift: float) -> None:
    schedule = FlowSchedule(4, shift=shift)
    clean, noise = draw(3, 8), draw(3, 8, seed=1)
    x_t, t, velocity = schedule.training_pair(clean, noise, torch.tensor([0.0, 0.5, 1.0]))
    assert t.tolist() == pytest.approx([0.0, 1000 * shift / (1 + shift), 1000.0])
    torch.testing.assert_close(x_t[0], clean[0])
    torch.testing.assert_close(x_t[2], noise[2])
    torch.testing.assert_close(x_t - (t / 1000)[:, None] * velocity, clean)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"shfit": 3.0}, "unknown key 'shfit'"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas = True is not supported"),
        ({"use_dynamic_shifting": True}, "use_dynamic_shifting"),
        ({"_class_name": "DDPMScheduler"}, "_class_name is 'DDPMScheduler'"),
        ({"shift": 0.0}, "shift 0.0"),
    ],
)
def test_wrong_configs_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FlowSchedule.from_config(config, 4)


def test_guidance_keeps_the_norm_between_its_limits() -> None:
    cond, uncond = draw(4, 6, 8), draw(4, 6, 8, seed=1)
    assert torch.equal(guide(cond, uncond, 1.0), cond)
    plain, held = guide(cond, uncond, 4.0), guide(cond, uncond, 4.0, renorm=0.1)
    torch.testing.assert_close(held.norm(dim=(1, 2)), cond.norm(dim=(1, 2)))
    torch.testing.assert_close(guide(cond, uncond, 4.0, renorm=0.999), 0.999 * plain)


def test_temperature_multiplies_every_deviation_and_nothing_else() -> None:
    plain, warm = FlowSchedule(5), FlowSchedule(5).at_temperature(0.5)
    x, velocity, noise = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    steps = torch.tensor([0, 3, 4, 1])
    assert warm.std == [0.5 * std for std in plain.std] and not warm.stochastic(4)
    torch.testing.assert_close(
        warm.transition(steps, x, velocity),
        (plain.mean(steps, x, velocity), 0.5 * plain.transition(steps, x, velocity)[1]),
    )
    mean, std = plain.transition(1, x, velocity)
    torch.testing.assert_close(warm.step(1, x, velocity, noise), mean + 0.5 * std * noise)
    assert FlowSchedule(5).at_temperature(1.0).std == plain.std
