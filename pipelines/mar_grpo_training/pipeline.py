"""From prompts to a promoted checkpoint."""

from kfp import dsl

from mar_grpo.components.benchmark_evaluation import benchmark_evaluation
from mar_grpo.components.finish import finish
from mar_grpo.components.grpo_training import grpo_training
from mar_grpo.components.promote import promote
from mar_grpo.components.promotion_gate import promotion_gate
from mar_grpo.components.prompt_data import prompt_data
from mar_grpo.components.report import report
from mar_grpo.components.reward_scoring import reward_scoring
from mar_grpo.components.sft_checkpoint import sft_checkpoint
from mar_grpo.components.validate_inputs import validate_inputs


def _uncached(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """KFP's cache sees URIs, not what lies there; the steps themselves know (by digest) what is already done."""
    return task.set_caching_options(False)


@dsl.pipeline(
    name="mar-grpo-training",
    description="Fine-tune an image generator with MAR-GRPO, and promote it only if a held-out judge sees it improve.",
)
def mar_grpo_training(store: str, recipe: str = "emoji", overrides: list = [], fresh: bool = False, command: str = ""):  # noqa: B006
    """Fine-tune an image generator with MAR-GRPO, and promote it only if a held-out judge sees it improve.

    Args:
        store: Root of the object store, s3://BUCKET[/PREFIX] or file:///FOLDER.
        recipe: Name of a shipped recipe, its URI, or its text as JSON.
        overrides: Changes to the recipe, each key.sub=value.
        fresh: Delete what an earlier run of the same recipe left.
        command: What to type to get the same run; shown in the report.
    """
    end = _uncached(finish(recipe=recipe, store=store, overrides=overrides))
    with dsl.ExitHandler(end, name="run"):
        checked = _uncached(validate_inputs(recipe=recipe, store=store, overrides=overrides, fresh=fresh))
        run = checked.output
        data = _uncached(prompt_data(run=run))
        start = _uncached(sft_checkpoint(run=run))
        held_out = data.outputs["evaluation"]
        before = _uncached(
            benchmark_evaluation(run=run, label="before", checkpoint=start.outputs["checkpoint"], prompts=held_out)
        )
        training = _uncached(
            grpo_training(
                run=run,
                checkpoint=start.outputs["checkpoint"],
                prompts=data.outputs["train"],
                evaluation=held_out,
            ).after(before)
        )
        rewards = _uncached(
            reward_scoring(
                run=run,
                before=start.outputs["checkpoint"],
                after=training.outputs["trained"],
                prompts=data.outputs["train"],
            )
        )
        after = _uncached(
            benchmark_evaluation(run=run, label="after", checkpoint=training.outputs["trained"], prompts=held_out)
        ).after(rewards)
        gate = _uncached(promotion_gate(run=run, before=before.outputs["scores"], after=after.outputs["scores"]))
        with dsl.If(gate.outputs["Output"] == True, name="promoted"):  # noqa: E712
            _uncached(promote(run=run, decision=gate.outputs["decision"], checkpoint=training.outputs["trained"]))
        _uncached(
            report(
                run=run,
                command=command,
                decision=gate.outputs["decision"],
                training=training.outputs["training"],
                before=before.outputs["scores"],
                after=after.outputs["scores"],
                rewards_before=rewards.outputs["scores_before"],
                rewards_after=rewards.outputs["scores_after"],
            )
        )
