"""Selection: which tokens are uncertain, and which agree with the finished image."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mar_grpo.algorithms.loss import AlgorithmConfig
from mar_grpo.algorithms.selection import SelectionConfig, consistent, most_uncertain, uncertainty, units
from mar_grpo.rollout import SamplingConfig
from tests.unit import toy

NONE = torch.tensor([False, False, False])


def directions(*degrees: float) -> torch.Tensor:
    """Tokens [1, M, 2] that point to these angles, of different lengths."""
    rows = [[math.cos(math.radians(d)) * (i + 1), math.sin(math.radians(d)) * (i + 1)] for i, d in enumerate(degrees)]
    return torch.tensor([rows])


def test_uncertainty_is_the_deviation_over_trajectories() -> None:
    final = torch.tensor([[[[1.0, 2.0], [0.0, 5.0]]], [[[3.0, 2.0], [4.0, 5.0]]]])  # [S 2, B 1, L 2, C 2]
    assert uncertainty(final).tolist() == [[0.5, 1.0]]


def test_uncertainty_of_a_token_is_the_mean_over_its_pixels() -> None:
    """The public implementation ranks latent pixels; a token of ours is a patch of them, or each of them."""
    recorded = load_file(Path(__file__).parents[1] / "golden/nova/a/grpo.safetensors")
    final = recorded["mte_xs"][:, -1]  # [S, B, c, H, W]
    cut = final.unflatten(3, (4, 2)).unflatten(5, (4, 2)).permute(0, 1, 3, 5, 4, 6, 2)
    tokens = cut.reshape(3, 4, 16, 16)
    per_pixel = recorded["uncertainty"][:, 0]
    expected = per_pixel.unflatten(1, (4, 2)).unflatten(3, (4, 2)).mean(dim=(2, 4)).flatten(1)
    torch.testing.assert_close(uncertainty(tokens), expected, rtol=0, atol=1e-5)
    each = uncertainty(units(tokens, 4)).unflatten(1, (4, 4)).unflatten(3, (2, 2)).permute(0, 1, 3, 2, 4)
    torch.testing.assert_close(each.reshape(per_pixel.shape), per_pixel, rtol=0, atol=1e-5)
    assert torch.equal(most_uncertain(per_pixel.flatten(1), 0.3), recorded["critic_mask"].flatten(1).bool())


@given(length=st.integers(1, 40), share=st.floats(0.01, 1.0), seed=st.integers(0, 1000))
def test_the_most_uncertain_share_is_chosen(length: int, share: float, seed: int) -> None:
    spread = torch.rand(3, length, generator=torch.Generator().manual_seed(seed))
    chosen = most_uncertain(spread, share)
    assert chosen.dtype == torch.bool and chosen.shape == spread.shape
    assert (chosen.sum(dim=1) == max(1, int(length * share))).all()
    for row, mask in zip(spread, chosen, strict=True):
        if not mask.all():
            assert row[mask].min() >= row[~mask].max()


def test_delta_keeps_what_comes_closer_to_the_finished_image() -> None:
    final, before, now = directions(0, 0, 0), directions(60, 60, 60), directions(30, 90, 60)
    config = SelectionConfig(mode="delta")
    assert consistent(now, before, final, NONE, config).tolist() == [[True, False, False]]
    rise = math.cos(math.radians(30)) - math.cos(math.radians(60))
    for threshold, kept in ((rise - 0.01, True), (rise + 0.01, False)):
        found = consistent(now, before, final, NONE, SelectionConfig(mode="delta", threshold=threshold))
        assert found.tolist() == [[kept, False, False]]


def test_absolute_keeps_what_is_close_to_the_finished_image() -> None:
    final, now = directions(0, 0, 0), directions(30, 91, 120)
    for threshold, kept in ((0.0, [True, False, False]), (0.9, [False, False, False]), (-0.1, [True, True, False])):
        config = SelectionConfig(mode="absolute", threshold=threshold)
        assert consistent(now, directions(0, 0, 0), final, NONE, config).tolist() == [kept]


@pytest.mark.parametrize("mode", ["delta", "absolute"])
def test_committed_tokens_are_always_kept(mode: str) -> None:
    final, before, now = directions(0, 0, 0), directions(10, 10, 10), directions(180, 180, 180)
    committed = torch.tensor([False, True, False])
    found = consistent(now, before, final, committed, SelectionConfig.model_validate({"mode": mode, "threshold": 0.5}))
    assert found.tolist() == [[False, True, False]]


def test_nothing_is_dropped_without_a_criterion() -> None:
    final, now = directions(0, 0, 0), directions(180, 180, 180)
    assert consistent(now, directions(0, 0, 0), final, NONE, SelectionConfig(mode="off")).all()
    assert consistent(now, None, final, NONE, SelectionConfig(mode="delta")).all()  # the first step has no before


def test_pixels_of_a_token_are_judged_one_by_one() -> None:
    """A token of three pixels: whole, it is kept for the sum of what its pixels say."""
    final, before, now = (directions(*degrees).flatten(1)[:, None] for degrees in ((0, 0, 0), (60,) * 3, (30, 90, 60)))
    config, nothing = SelectionConfig(), torch.tensor([False])
    each = consistent(units(now, 3), units(before, 3), units(final, 3), nothing[:, None], config)
    assert each.tolist() == [[[True, False, False]]]
    assert consistent(now, before, final, nothing, config).shape == (1, 1)


CASES = {
    "delta": {"selection": {"mode": "delta", "threshold": 0.05}},
    "delta, pixels": {"selection": {"mode": "delta", "unit": "pixel"}},
    "absolute": {"selection": {"mode": "absolute", "threshold": 0.5}},
    "delta, later": {"selection": {"mode": "delta", "threshold": 0.05, "first_ar_step": 2}},
    "off": {"selection": {"mode": "off"}},
}


@pytest.mark.parametrize("case", CASES)
def test_what_an_update_keeps_of_a_rollout(case: str) -> None:
    """All committed tokens; all tokens of early AR steps; of the others what the criterion says of each unit."""
    sampling = SamplingConfig(ar_steps=4, diffusion_steps=3)
    config = AlgorithmConfig.model_validate({"trajectories": {"mode": "off"}, **CASES[case]})
    u = toy.update(toy.policy(), [0, 1, 1], [1, 2, 3], sampling, config)
    chosen, count = config.selection, 4 if "pixels" in case else 1
    for step in u.rollout.steps:
        keep = u.batch.keep[step.index]
        assert keep.shape == (3, step.places.shape[1], count)
        assert keep[:, : step.num_committed].all()
        index = step.places[..., None].expand(-1, -1, 16)
        finals = units(u.rollout.tokens.gather(1, index), count)
        rise = torch.cosine_similarity(units(step.path.final, count), finals, dim=-1)
        before = u.before[step.index]
        if before is not None:
            rise -= torch.cosine_similarity(units(before, count), finals, dim=-1)
        expected = rise > chosen.threshold
        if chosen.mode == "off" or step.index < chosen.first_ar_step:
            expected = torch.ones_like(expected)
        expected[:, : step.num_committed] = True
        assert torch.equal(keep, expected)
    whole = torch.cat([keep.flatten() for keep in u.batch.keep.values()])
    assert bool(whole.all()) == (case == "off")


@pytest.mark.parametrize("unit", ["token", "pixel"])
def test_the_control_takes_out_the_uncertain_part(unit: str) -> None:
    """And nothing else: of committed tokens, too."""
    sampling = SamplingConfig(ar_steps=4, diffusion_steps=3)
    given = {"trajectories": {"mode": "drop_topk", "share": 0.5, "unit": unit}, "selection": {"threshold": 0.05}}
    dropped, free = (
        toy.update(
            toy.policy(), [0, 1], [1, 2], sampling,
            AlgorithmConfig.model_validate(given | {"trajectories": {"mode": mode, "share": 0.5, "unit": unit}}),
        ).batch
        for mode in ("drop_topk", "composite")
    )  # fmt: skip
    assert dropped.trajectories is not None and dropped.trajectories.whole is not None
    assert dropped.trajectories.whole.uncertain.float().mean() == 0.5
    for step in dropped.rollout.steps:
        uncertain = dropped.trajectories.at(step).uncertain
        assert torch.equal(dropped.keep[step.index], free.keep[step.index] & ~uncertain)
        assert uncertain[:, : step.num_committed].any()
