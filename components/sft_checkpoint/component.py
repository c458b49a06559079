"""The model that training starts from."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def sft_checkpoint(run: str, checkpoint: dsl.Output[dsl.Model]):
    """Bring the recipe's SFT checkpoint into the store, every file with its digest.

    Args:
        run: URI of the run.
        checkpoint: Checkpoint document.
    """
    from mar_grpo import artifacts, runs, steps

    with runs.surfaced("sft_checkpoint", run):
        artifacts.name_document(checkpoint, steps.sft_checkpoint(runs.Run.open(run))["checkpoint"])
