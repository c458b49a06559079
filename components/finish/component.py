"""Exit task: runs whatever happened."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def finish(recipe: str, store: str, overrides: list, status: dsl.PipelineTaskFinalStatus):
    """Write down how the pipeline ended and, if a step failed, which one and why.

    Args:
        recipe: As for validate_inputs.
        store: As for validate_inputs.
        overrides: As for validate_inputs.
        status: Given by KFP.
    """
    from mar_grpo import runs, steps

    with runs.surfaced("finish"):
        steps.finish(recipe, store, overrides, status.state, status.error_message or "")
