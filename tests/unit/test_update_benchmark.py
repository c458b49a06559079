"""The released procedure and ours make the same gradient, ours with less work; what counts the work counts right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mar_grpo.rollout import SamplingConfig
from tests.benchmarks import update, update_table
from tests.benchmarks.update_meters import counted
from tests.benchmarks.update_models import Size, harmon, nova
from tests.benchmarks.update_operations import needed, released

FEW = {"scored_ar_steps": {"count": 2}, "scored_diffusion_steps": {"count": 2}}
SAMPLING = SamplingConfig(ar_steps=6, diffusion_steps=4, guidance_scale=5.0)
NOVA = nova("nova", 6, 32, 2, 4, (2, 32), group=2, sampling=SAMPLING, **FEW)
SAMPLING = SamplingConfig(ar_steps=6, diffusion_steps="ddim5", guidance_scale=2.0)
HARMON = harmon("harmon", 8, 24, 2, 2, (2, 192, 64), (2, 32), group=2, sampling=SAMPLING, **FEW)


@pytest.fixture(scope="module", params=[NOVA, HARMON], ids=["nova", "harmon"])
def measured(request: pytest.FixtureRequest) -> update.Measured:
    return update.measure(request.param, 1)


def test_gradients_are_equal(measured: update.Measured) -> None:
    assert measured.difference < 1e-4


def operations(measured: update.Measured, way: str) -> int:
    """Of rollout and update (rewards are the same)."""
    return measured.costs[way]["rollout"].operations + measured.costs[way]["update"].operations


def test_ours_is_less_work_in_less_memory(measured: update.Measured) -> None:
    numbers = update.summary(measured)
    assert operations(measured, "ours") < 0.8 * operations(measured, "released")
    assert 0 < numbers["operations_ratio"] < 1
    assert 0 < numbers["rollout_head_operations_ratio"] < 0.7
    assert 0 < numbers["update_memory_ratio"] < 0.5


def test_formulas_say_what_the_counter_finds(measured: update.Measured) -> None:
    for price, way, spare in ((released, "released", 0.02), (needed, "ours", 0.1)):
        paper = sum(price(measured.size.network, measured.plan).values())
        assert operations(measured, way) == pytest.approx(paper, rel=spare)


def test_the_table_has_every_phase(measured: update.Measured) -> None:
    table = update_table.render(measured, update.summary(measured))
    assert all(phase in table for phase in (*update.PHASES, "step", "published", "gradients differ"))


def test_a_different_gradient_is_seen() -> None:
    other = replace(NOVA, algorithm=NOVA.algorithm.model_copy(update={"reduction": "steps"}))
    assert gradient_of(update.Ours, other) != pytest.approx(gradient_of(update.Released, NOVA), rel=1e-2)
    assert gradient_of(update.Ours, NOVA) == pytest.approx(gradient_of(update.Released, NOVA), rel=1e-3)


def gradient_of(way: type[update.Released], size: Size) -> float:
    """Its norm."""
    policy = size.make()
    counts = policy.mask_schedule(size.sampling.ar_steps)
    steps = update.typical_steps(counts, update.schedule_of(policy, size.sampling), size.algorithm)
    _, gradient, _ = update.count(way(size, policy, update.reference_of(policy), steps))
    return torch.stack([value.norm() for value in gradient.values()]).norm().item()


def test_attention_and_what_lives_are_counted() -> None:
    policy = NOVA.make()
    query = torch.randn(2, 3, 16, 8, requires_grad=True)
    out, cost = counted(lambda: F.scaled_dot_product_attention(query, query, query), [policy])
    assert cost.operations == 2 * 2 * (2 * 3 * 16 * 16 * 8)
    assert out.nbytes <= cost.peak_bytes < 3 * out.nbytes
    _, cost = counted(lambda: out.sum().backward(), [policy])
    assert cost.operations == 5 * 2 * (2 * 3 * 16 * 16 * 8)
    _, cost = counted(lambda: (query * 2).detach().exp_().sum(), [policy], [query])
    assert 2 * query.nbytes <= cost.peak_bytes < 3 * query.nbytes
    state, z = torch.randn(4, policy.token_dim), torch.randn(4, 32)
    _, cost = counted(lambda: policy.head(state, torch.tensor(3.0), z), [policy])
    assert cost.head_operations == cost.operations > 4 * (NOVA.network.head + NOVA.network.projection)
    assert "head_conditioned" not in vars(policy)
