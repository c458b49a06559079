"""The one step that changes what others use."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def promote(
    run: str, decision: dsl.Input[dsl.Artifact], checkpoint: dsl.Input[dsl.Model], champion: dsl.Output[dsl.Model]
):
    """Point champion.json of the store at the trained checkpoint, after writing down whom it replaces.

    Args:
        run: URI of the run.
        decision: Gate decision document; it must say so, and be about this checkpoint.
        checkpoint: Checkpoint document of the result.
        champion: The same document, now the champion.
    """
    from mar_grpo import artifacts, runs, steps

    with runs.surfaced("promote", run):
        reference = artifacts.document_of(checkpoint)
        steps.promote(runs.Run.open(run), artifacts.document_of(decision), reference)
        artifacts.name_document(champion, reference)
