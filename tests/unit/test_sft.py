"""SFT: it learns, it goes on where it stopped to the last bit, and it refuses what is not its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mar_grpo.errors import InputError, UnhealthyError
from mar_grpo.models.checkpoint import save_policy
from mar_grpo.models.policy import Policy
from mar_grpo.training.sft import Ema, SftConfig, known_counts, make_optimizers, rate_factor, sft_loss, train_sft
from mar_grpo.training.sft_run import SftRecipe, run_sft
from tests.unit import tiny, tiny_mar


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Training flushes them for the whole process; other tests get them back."""
    yield
    torch.set_flush_denormal(False)


PROMPTS = ["a dog", "two red apples", "a red circle", "a photo of a dog"] * 4
SMALL: dict[str, Any] = {
    "updates": 6, "batch_size": 8, "parts": 2, "draws_per_token": 2, "warmup_updates": 2, "validate_every": 2,
    "save_every": 2,
}  # fmt: skip


def tokens(seed: int = 0) -> Tensor:
    """Clean tokens [16, 16, 16]: one pattern a prompt and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(99))
    return patterns.repeat(4, 1, 1) + 0.1 * torch.randn(16, 16, 16, generator=generator)


def train(
    folder: Path, report: Callable[[dict[str, float]], None] = lambda row: None, data: Tensor | None = None,
    policy: Policy | None = None, **changes: Any,
) -> tuple[Policy, dict[str, float]]:  # fmt: skip
    made = policy or tiny.policy()
    config = SftConfig.model_validate(SMALL | changes)
    held_out = (tokens(1), PROMPTS)
    last = train_sft(made, tokens() if data is None else data, PROMPTS, held_out, config, folder, report)
    return made, last


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("save_every", [2, 3])  # with the reports, and between them
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path: Path, optimizer: str, save_every: int) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "save_every": save_every, "train_text_encoder": True}
    whole, last = train(tmp_path / "whole", policy=wide(), **options)
    seen: list[dict[str, float]] = []

    def stop_at_second(row: dict[str, float]) -> None:
        seen.append(row)
        if len(seen) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(tmp_path / "cut", stop_at_second, policy=wide(), **options)
    resumed, again = train(tmp_path / "cut", seen.append, policy=wide(), **options)
    assert again == seen[-1]
    found, expected = ([{k: v for k, v in row.items() if k != "seconds"} for row in rows] for rows in (seen, [last]))
    assert [row["update"] for row in found] == [2, 4, 4, 6]
    assert found[1] == found[2] and found[3] == expected[0]
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


def wide() -> Policy:
    """Wide enough for Muon, which takes matrices of at least 32 x 32."""
    return tiny.policy(transformer={"arch": ["vit_d1w32", "vit_d2w32", "mlp_d1w32"]})


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first, last = train(tmp_path)
    again, same = train(tmp_path, lambda row: pytest.fail("it reported"))
    assert same == last and last["update"] == 6
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))


def test_validation_loss_falls(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    train(
        tmp_path, rows.append, updates=45, learning_rate=1e-2, warmup_updates=5, validate_every=15, ema_decay=0.9,
        batch_size=16,
    )  # fmt: skip
    losses = [row["validation_loss"] for row in rows]
    assert losses[-1] < 0.95 * losses[0] and losses == sorted(losses, reverse=True)


def test_it_stops_before_its_schedule_ends(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    _, last = train(tmp_path / "short", rows.append, updates=12, stop_after=3, validate_every=5)
    assert [row["update"] for row in rows] == [3] and last["update"] == 3
    config = SftConfig(updates=12, decay_share=0.5, warmup_updates=2)
    assert [rate_factor(step, config) for step in (0, 1, 5, 6, 9, 11)] == [0.5, 1.0, 1.0, 1.0, 0.5, 1 / 6]


@pytest.mark.parametrize(
    "other",
    [
        {"learning_rate": 2e-3},
        {"updates": 8},
        {"data": tokens(3)},
        {"policy": tiny.policy(seed=1)},
    ],
    ids=["rate", "updates", "pictures", "start"],
)
def test_the_state_of_another_run_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    train(tmp_path, updates=2) if "updates" not in other else train(tmp_path)
    changed = {"updates": 2} | other
    with pytest.raises(InputError, match="belongs to another configuration, data set or start") as error:
        train(tmp_path, **changed)
    assert error.value.exit_code == 2 and str(tmp_path) in str(error.value)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    train(tmp_path, updates=2)
    content = (tmp_path / "state.pt").read_bytes()
    for cut in (0, 100, len(content) // 2):
        (tmp_path / "state.pt").write_bytes(content[:cut])
        with pytest.raises(InputError, match="damaged"):
            train(tmp_path, updates=2)


def test_nothing_to_learn_from_is_refused(tmp_path: Path) -> None:
    config = SftConfig.model_validate(SMALL)
    empty = torch.zeros(0, 16, 16)
    with pytest.raises(InputError, match="0 pictures and 0 captions"):
        train_sft(tiny.policy(), empty, [], (tokens(), PROMPTS), config, tmp_path, lambda row: None)
    with pytest.raises(InputError, match="16 pictures and 1 captions"):
        train_sft(tiny.policy(), tokens(), ["a dog"], (tokens(), PROMPTS), config, tmp_path, lambda row: None)
    with pytest.raises(InputError, match="no pictures to validate on"):
        train_sft(tiny.policy(), tokens(), PROMPTS, (empty, []), config, tmp_path, lambda row: None)


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_spoiled(tmp_path: Path) -> None:
    policy = tiny.policy()
    with pytest.raises(UnhealthyError, match=r"not finite \(update 1\)"):
        train(tmp_path, data=torch.full((16, 16, 16), float("nan")), policy=policy)
    assert all(parameter.isfinite().all() for parameter in policy.parameters())
    assert not (tmp_path / "state.pt").exists()


@given(parts=st.integers(1, 12), length=st.integers(1, 1024), seed=st.integers(0, 1000))
def test_numbers_of_known_tokens_are_spread_over_the_schedule(parts: int, length: int, seed: int) -> None:
    counts = known_counts(parts, length, np.random.default_rng(seed))
    assert len(counts) == parts and counts == sorted(counts)
    assert all(0 <= count < length for count in counts)
    for number, count in enumerate(counts):  # each part has its own stretch of the cosine
        low, high = (length - length * np.cos(0.5 * np.pi * (number + d) / parts) for d in (0, 1))
        assert low - 1 <= count <= high


def test_known_until_stays_at_the_start_of_the_schedule() -> None:
    generator = np.random.default_rng(0)
    assert known_counts(4, 16, generator, 0.2) == [0, 0, 0, 0]  # 16 cos(0.1 pi) = 15.2
    assert max(max(known_counts(4, 64, generator, 0.5)) for _ in range(50)) in range(
        15, 20
    )  # 64 - 64 cos(pi / 4) = 18.7


def test_the_loss_reads_unknown_tokens_only_as_targets() -> None:
    """The expected loss of a head that says nothing is the mean square of the velocity, noise - x_0."""
    policy = tiny.policy()  # its head starts at zero
    config = SftConfig.model_validate(SMALL | {"draws_per_token": 8, "parts": 4})
    data = 2.0 * torch.ones(16, 16, 16)
    losses = [
        sft_loss(policy, data, policy.text.encode(PROMPTS), config, np.random.default_rng(seed)).item()
        for seed in range(20)
    ]
    assert np.mean(losses) == pytest.approx(1.0 + 4.0, rel=0.02)


def test_only_what_is_asked_for_is_trained(tmp_path: Path) -> None:
    start = tiny.policy()
    alone, _ = train(tmp_path / "alone")
    together, _ = train(tmp_path / "together", train_text_encoder=True)

    def changed(policy: Policy, part: str) -> bool:
        named = dict(start.named_parameters())
        return any(not torch.equal(v, named[n]) for n, v in policy.named_parameters() if n.startswith(part))

    assert changed(alone, "transformer.image_decoder") and changed(alone, "transformer.image_encoder")
    assert not changed(alone, "text") and changed(together, "text")
    assert not changed(alone, "vae") and not changed(together, "vae")
    assert torch.equal(alone.transformer.text_embed.weight, start.transformer.text_embed.weight)


def test_muon_takes_the_matrices_only() -> None:
    policy = wide()
    named, optimizers = make_optimizers(policy, SftConfig(updates=1, optimizer="muon"))
    adamw, muon = ([p for group in o.param_groups for p in group["params"]] for o in optimizers)
    assert len(adamw) + len(muon) == len(named)
    assert muon and all(p.ndim == 2 and min(p.shape) >= 32 for p in muon)


def test_average_of_the_weights() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    ema = Ema({"p": parameter}, decay=0.9)
    average = 0.0
    for step in range(1, 40):
        parameter.data.fill_(float(step))
        decay = min(0.9, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * step
        ema.update(step)
    assert ema.average["p"].item() == pytest.approx(average, rel=1e-5)
    ema.swap()
    assert parameter.item() == pytest.approx(average, rel=1e-5) and ema.average["p"].item() == 39.0
    ema.swap()
    assert parameter.item() == 39.0


def test_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    train(tmp_path, updates=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_family_is_refused(tmp_path: Path) -> None:
    save_policy(tiny_mar.mar(), tmp_path / "mar")
    recipe = SftRecipe(name="x", checkpoint=str(tmp_path / "mar"), sft=SftConfig(updates=1))
    with pytest.raises(InputError, match="built for NOVA, this is Mar"):
        run_sft(recipe, tmp_path / "out", tmp_path / "work", lambda row: None)
    assert not (tmp_path / "out").exists()
