"""The DDPM with a learned variance: what a respacing keeps, what a step is, what its training loss trains.

Tables, transitions and losses are compared with recorded ones in `tests/conformance/mar.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mar_grpo.diffusion.respaced import RespacedSchedule, kept_steps, noised, training_loss
from mar_grpo.errors import InputError


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("spacing", "kept"),
    [
        (1, [0]),
        ("3", [0, 500, 999]),  # 499.5 is rounded to the even neighbour
        ("ddim4", [0, 250, 500, 750]),
        ("2,3", [0, 499, 500, 750, 999]),
        ("1,1,2", [0, 334, 667, 999]),
    ],
)
def test_what_a_respacing_keeps(spacing: int | str, kept: list[int]) -> None:
    assert kept_steps(spacing) == kept


@pytest.mark.parametrize("spacing", ["", "ten", "ddim", "ddim600", "5,", "0", "-3", "1001", "600,10", "ddim0"])
def test_what_is_no_respacing(spacing: str) -> None:
    with pytest.raises(InputError, match=r"diffusion steps|stride"):
        kept_steps(spacing)


def test_the_head_sees_original_timesteps_noisiest_first() -> None:
    schedule = RespacedSchedule("ddim4")
    assert schedule.num_steps == 4 and schedule.timesteps.tolist() == [750, 500, 250, 0]
    assert [schedule.stochastic(j) for j in range(4)] == [True, True, True, False]
    assert not RespacedSchedule(1).stochastic(0)


def test_a_step_is_the_posterior_of_the_clean_sample() -> None:
    """With the true noise predicted, the clean sample is found and the last step gives it."""
    schedule, x_0, noise = RespacedSchedule(20), draw(6, 4), draw(6, 4, seed=1)
    for j in (1, 12, 19):
        t = schedule.timesteps[j].long().expand(6)
        x_t = noised(RespacedSchedule(), x_0, noise, t)
        prediction = torch.cat([noise, draw(6, 4, seed=2)], dim=1)
        torch.testing.assert_close(schedule.predicted_sample(j, x_t, prediction), x_0, atol=1e-3, rtol=1e-3)
        mean, std = schedule.transition(j, x_t, prediction)
        if j == 19:
            assert std == 0.0
            torch.testing.assert_close(mean, x_0, atol=1e-5, rtol=1e-5)
    x_t, t, target = schedule.training_pair(x_0, noise, torch.full((6,), 0.25))
    assert t.tolist() == [250.0] * 6 and torch.equal(target, noise)
    torch.testing.assert_close(x_t, noised(RespacedSchedule(), x_0, noise, t.long()))


def test_the_deviation_is_learned_between_two_ends_and_has_no_gradient() -> None:
    schedule, x = RespacedSchedule(10), draw(5, 4)
    prediction = draw(5, 8, seed=1).requires_grad_()
    for v, table in ((1.0, schedule.betas), (-1.0, schedule.posterior_log_variance_clipped)):
        expected = math.sqrt(table[6]) if v > 0 else math.exp(0.5 * table[6])  # t = 6 is j = 3
        _, std = schedule.transition(3, x, torch.cat([prediction[:, :4], torch.full((5, 4), v)], dim=1))
        torch.testing.assert_close(std, torch.full((5, 4), expected))
    mean, std = schedule.transition(3, x, prediction)
    assert isinstance(std, Tensor) and std.shape == x.shape and not std.requires_grad
    (gradient,) = torch.autograd.grad(mean.sum(), prediction)
    assert gradient[:, :4].all() and not gradient[:, 4:].any()
    hot = RespacedSchedule(10).at_temperature(0.5)
    torch.testing.assert_close(hot.transition(3, x, prediction)[1], 0.5 * std)
    torch.testing.assert_close(hot.transition(3, x, prediction)[0], mean)
    noise = draw(5, 4, seed=2)
    torch.testing.assert_close(schedule.step(3, x, prediction, noise), mean + std * noise)
    assert torch.equal(schedule.step(9, x, prediction, noise), schedule.mean(9, x, prediction))


def test_index_tensors_are_the_same_steps() -> None:
    schedule, x, prediction = RespacedSchedule(10).at_temperature(0.7), draw(4, 3, 2), draw(4, 3, 4, seed=1)
    steps = torch.tensor([0, 9, 4, 4])
    means, stds = schedule.transition(steps, x, prediction)
    for row, j in enumerate(steps.tolist()):
        mean, std = schedule.transition(j, x[row], prediction[row])
        assert torch.equal(means[row], mean)
        torch.testing.assert_close(torch.as_tensor(stds)[row], torch.as_tensor(std).expand(3, 2))


def test_each_half_of_the_loss_trains_its_half_of_the_head() -> None:
    x_0, noise, t = draw(6, 4), draw(6, 4, seed=1), torch.tensor([0, 1, 50, 400, 900, 999])
    output = draw(6, 8, seed=2).requires_grad_()
    mse, vb = training_loss(lambda x_t, at: output, x_0, noise, t, RespacedSchedule())
    assert mse.shape == vb.shape == (6,)
    (first,) = torch.autograd.grad(mse.sum(), output, retain_graph=True)
    (second,) = torch.autograd.grad(vb.sum(), output)
    assert first[:, :4].all() and not first[:, 4:].any()
    assert second[:, 4:].all() and not second[:, :4].any()


def test_the_right_variance_has_the_smallest_bound() -> None:
    """With the true noise predicted, the bound is least where the variance is the posterior's (v = -1)."""
    x_0, noise, t = draw(1, 4).expand(3, 4), draw(1, 4, seed=1).expand(3, 4), torch.full((3,), 300)
    output = torch.cat([noise, torch.tensor([-1.5, -1.0, -0.5])[:, None].expand(3, 4)], dim=1)
    mse, vb = training_loss(lambda x_t, at: output, x_0, noise, t, RespacedSchedule())
    assert not mse.any() and vb[1] == vb.min() and vb[1].abs() < 1e-4
