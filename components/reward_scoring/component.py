"""Whether training did what its reward asked for."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def reward_scoring(
    run: str,
    before: dsl.Input[dsl.Model],
    after: dsl.Input[dsl.Model],
    prompts: dsl.Input[dsl.Dataset],
    scores_before: dsl.Output[dsl.Dataset],
    scores_after: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
):
    """Score pictures of training prompts with the training reward, before and after. The gate does not look at it.

    Args:
        run: URI of the run.
        before: Checkpoint document training started from.
        after: Checkpoint document of the result.
        prompts: Prompt set document of the training prompts.
        scores_before: Score table document of the first.
        scores_after: Score table document of the second.
        metrics: Mean of every component of the reward, after.
    """
    from mar_grpo import artifacts, runs, steps

    with runs.surfaced("reward_scoring", run):
        given = [artifacts.document_of(one) for one in (before, after, prompts)]
        made = steps.reward_scoring(runs.Run.open(run), *given)
        artifacts.name_document(scores_before, made["before"], label="before")
        artifacts.name_document(scores_after, made["after"], label="after")
        artifacts.log_finite(metrics, steps.means_of(made["after"]))
