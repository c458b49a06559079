"""The page a person reads."""

from kfp import dsl

from mar_grpo.components.base import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False, packages_to_install=[])
def report(
    run: str,
    command: str,
    decision: dsl.Input[dsl.Artifact],
    training: dsl.Input[dsl.Artifact],
    before: dsl.Input[dsl.Dataset],
    after: dsl.Input[dsl.Dataset],
    rewards_before: dsl.Input[dsl.Dataset],
    rewards_after: dsl.Input[dsl.Dataset],
    page: dsl.Output[dsl.HTML],
):
    """Write one self-contained HTML page: what was run, curves, pictures before and after, the gate's numbers.

    Args:
        run: URI of the run.
        command: What to type to get the same run; shown on the page.
        decision: Gate decision document.
        training: Training run document.
        before: Held-out score table document before training.
        after: Held-out score table document after training.
        rewards_before: Training reward score table document before training.
        rewards_after: Training reward score table document after training.
        page: The page; also STORE/runs/NAME/report.html.
    """
    from mar_grpo import artifacts, runs, steps

    with runs.surfaced("report", run):
        given = [artifacts.document_of(a) for a in (decision, training, before, after, rewards_before, rewards_after)]
        entry = steps.report(
            runs.Run.open(run), *given[:2], (given[2], given[3]), (given[4], given[5]), command=command
        )
        with open(page.path, "wb") as file:
            file.write(steps.read_uri(entry.uri, sha256=entry.sha256))
        page.metadata.update(store_uri=entry.uri, sha256=entry.sha256)
