"""MAR-GRPO."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def grpo_training(
    run: str,
    checkpoint: dsl.Input[dsl.Model],
    prompts: dsl.Input[dsl.Dataset],
    evaluation: dsl.Input[dsl.Dataset],
    training: dsl.Output[dsl.Artifact],
    trained: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Fine-tune the checkpoint with MAR-GRPO in torchrun processes, from the last saved state if there is one.

    Args:
        run: URI of the run.
        checkpoint: Checkpoint document to start from.
        prompts: Prompt set document of the training prompts.
        evaluation: Prompt set document of the held-out prompts, looked at for the curves only.
        training: Training run document.
        trained: Checkpoint document of the result.
        metrics: Numbers of the last update.
    """
    from mar_grpo import artifacts, runs, steps

    with runs.surfaced("grpo_training", run):
        given = [artifacts.document_of(one) for one in (checkpoint, prompts, evaluation)]
        made = steps.grpo_training(runs.Run.open(run), *given)
        artifacts.name_document(training, made["run"])
        artifacts.name_document(trained, made["checkpoint"])
        artifacts.log_finite(metrics, steps.last_update(made["run"]))
