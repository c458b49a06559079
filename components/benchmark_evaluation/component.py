"""Held-out accuracy of a checkpoint, by a judge that training never sees."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def benchmark_evaluation(
    run: str,
    label: str,
    checkpoint: dsl.Input[dsl.Model],
    prompts: dsl.Input[dsl.Dataset],
    scores: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
):
    """Draw the held-out prompts with fixed noise and judge the pictures.

    Args:
        run: URI of the run.
        label: before or after; both draw with the same noise, picture by picture.
        checkpoint: Checkpoint document.
        prompts: Prompt set document of the held-out prompts.
        scores: Score table document.
        metrics: Mean of every score, over all prompts and per tag.
    """
    from mar_grpo import artifacts, runs, steps

    with runs.surfaced(f"benchmark_{label}", run):
        given = artifacts.document_of(checkpoint), artifacts.document_of(prompts)
        table = steps.benchmark_evaluation(runs.Run.open(run), label, *given)["score_table"]
        artifacts.name_document(scores, table, label=label)
        artifacts.log_finite(metrics, steps.means_of(table))
