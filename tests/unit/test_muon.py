"""Muon against torch's own, which rounds to bfloat16, and against the exact polar factor."""

import pytest
import torch

from mar_grpo.training.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ orthogonalised(matrices) @ v.mT  # diagonal in the singular vectors of the input
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-4
    # the quintic lifts all but the smallest singular values into this band
    assert values.max() < 1.25 and values.median() > 0.65 and values.min() > 0.0


def test_steps_are_those_of_torch_up_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(8, 8), (24, 8), (8, 8), (8, 24)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    ours = [torch.nn.Parameter(value.clone()) for value in start]
    theirs = [torch.nn.Parameter(value.clone()) for value in start]
    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    optimizers = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, value in zip(ours, theirs, start, strict=True):
        moved = (other - value).norm()
        assert (one - other).norm() < 0.02 * moved


def test_a_parameter_without_gradient_stays_and_state_is_loaded() -> None:
    value = torch.eye(4)
    used, unused = torch.nn.Parameter(value.clone()), torch.nn.Parameter(value.clone())
    optimizer = Muon([used, unused], lr=0.1, momentum=0.9, weight_decay=0.0)
    used.grad = torch.ones(4, 4)
    optimizer.step()
    assert torch.equal(unused, value) and not torch.equal(used, value)
    other = Muon([used, unused], lr=0.1, momentum=0.9, weight_decay=0.0)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[used]["momentum_buffer"], optimizer.state[used]["momentum_buffer"])
