"""Whether the result may replace what was there before."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def promotion_gate(
    run: str,
    before: dsl.Input[dsl.Dataset],
    after: dsl.Input[dsl.Dataset],
    decision: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
) -> bool:
    """Compare the held-out score tables picture by picture; never the training reward.

    Args:
        run: URI of the run.
        before: Score table document of the checkpoint before.
        after: Score table document of the trained checkpoint.
        decision: Gate decision document.
        metrics: What each rule measured.

    Returns:
        Whether to promote.
    """
    from mar_grpo import artifacts, runs, steps

    with runs.surfaced("promotion_gate", run):
        given = artifacts.document_of(before), artifacts.document_of(after)
        reference, made = steps.promotion_gate(runs.Run.open(run), *given)
        artifacts.name_document(decision, reference)
        artifacts.log_finite(metrics, {rule.name: rule.measured for rule in made.rules})
        return made.promote
