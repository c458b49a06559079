"""Prompts for training and for evaluation, as checked WebDataset shards."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def prompt_data(run: str, train: dsl.Output[dsl.Dataset], evaluation: dsl.Output[dsl.Dataset]):
    """Write training and held-out prompts as WebDataset shards with manifests; the two never ask for the same.

    Args:
        run: URI of the run.
        train: Prompt set document of the training prompts.
        evaluation: Prompt set document of the held-out prompts.
    """
    from mar_grpo import artifacts, runs, steps

    with runs.surfaced("prompt_data", run):
        made = steps.prompt_data(runs.Run.open(run))
        artifacts.name_document(train, made["train"])
        artifacts.name_document(evaluation, made["evaluation"])
