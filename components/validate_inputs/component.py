"""First step: nothing is made before everything that can be wrong has been looked at."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def validate_inputs(recipe: str, store: str, overrides: list, fresh: bool = False) -> str:
    """Check recipe, store, checkpoint and rewards, and open the run.

    Args:
        recipe: Name of a shipped recipe, its URI, or its text as JSON.
        store: Root of the object store, s3://BUCKET[/PREFIX] or file:///FOLDER.
        overrides: Changes to the recipe, each key.sub=value.
        fresh: Delete what an earlier run of the same recipe left.

    Returns:
        URI of the run, STORE/runs/NAME. Equal recipes (seed included) are one run.
    """
    from mar_grpo import runs, steps

    with runs.surfaced("validate_inputs"):
        return steps.validate_inputs(recipe, store, overrides=overrides, fresh=fresh).uri
