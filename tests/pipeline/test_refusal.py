"""A reward that can be hacked: training does what it was told, and the gate says no."""

from __future__ import annotations

from pathlib import Path

from mar_grpo.config import load_recipe
from mar_grpo.documents import DocumentRef, GateDecision, ScoreTable, read_document
from mar_grpo.launch.object_store import serve
from tests.pipeline.test_run import finish, only_run

SHORTER = [
    "training.updates=10", "training.held_out_every=0", "optimizer.warmup_updates=2", "data.evaluation_prompts=110",
    "evaluation_sampling.diffusion_steps=6",
]  # fmt: skip


def test_a_hacked_reward_rises_and_the_gate_refuses(tmp_path: Path) -> None:
    _, text = finish(load_recipe("emoji-hackable", SHORTER).model_dump_json(), tmp_path)
    assert "Gate:              do not promote: accuracy_rose" in text
    with serve(tmp_path / "store") as store:
        records = {name: record["outputs"] for name, record in only_run(store).records()}
        before, after = (
            read_document(DocumentRef(**records["reward_scoring"][side]), ScoreTable)
            .summary["heatmap/presence"]
            .overall
            for side in ("before", "after")
        )
        error = (before.standard_error or 0.0) + (after.standard_error or 0.0)
        assert after.mean > before.mean + error, "the reward was not hacked, so nothing was shown"
        decision = read_document(DocumentRef(**records["promotion_gate"]["decision"]), GateDecision)
        rose = next(rule for rule in decision.rules if rule.name == "accuracy_rose")
        assert not decision.promote
        assert not rose.passed
        assert not store.exists("champion.json")
