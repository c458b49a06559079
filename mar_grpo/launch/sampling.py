"""The `sample` command: from what was asked for to a folder of pictures, in this process or in several."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from mar_grpo.config import load_recipe
from mar_grpo.data.prompts import parse_row, read_prompt_file
from mar_grpo.errors import InputError
from mar_grpo.launch.local import run_workers
from mar_grpo.progress import View
from mar_grpo.store import Store


def sample_files(
    texts: Sequence[str],
    prompt_file: str | None,
    checkpoint: str,
    others: Sequence[str],
    recipe: str,
    overrides: Sequence[str],
    *,
    out: Path,
    seeds: Sequence[int],
    processes: int,
    work: Path,
) -> None:
    """Sample as `mar_grpo.sampling.sample`; the processes of a torchrun share the work, or as many as are asked for.

    Args:
        texts, prompt_file: prompts, and a file with more of them.
        others: URIs of what the checkpoint lacks.
        recipe, overrides: their `evaluation_sampling` says how.
        work: local folder for what comes from a store.

    Raises:
        InputError: no prompt, or what `sample`, the prompt file, the recipe or the checkpoint is refused for.
    """
    sampling = load_recipe(recipe, overrides).evaluation_sampling
    records = [parse_row(text, where=f"prompt {number}") for number, text in enumerate(texts, 1)]
    records += read_prompt_file(prompt_file) if prompt_file else []
    if not records:
        raise InputError("there is no prompt", hint="give one, or a file with --prompts")
    if processes > 1 and "RANK" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="mar-grpo-") as logs:
            return run_workers(sys.argv[1:], count=processes, threads=1, folder=Path(logs), max_relaunches=0)

    from mar_grpo.models.checkpoint import fetch_checkpoint, folder_digest, load_policy
    from mar_grpo.sampling import sample
    from mar_grpo.training.distributed import Processes

    with Processes() as group, ExitStack() as stack:
        view = stack.enter_context(View()) if group.first else None
        with group.together():
            place, *beside = (fetch_checkpoint(uri, work / "checkpoints") for uri in (checkpoint, *others))
            policy, digest = load_policy(place, others=beside), folder_digest(place)
            policy.keep_features(Store(str(work.resolve())), "text_features/sample")  # made with invariant arithmetic

        def show(done: int, total: int) -> None:
            if view:
                view.show({"event": "progress", "step": "sample", "done": done, "total": total})

        prompts = [record.prompt for record in records]
        sample(policy, prompts, seeds, out, sampling, checkpoint=digest, group=group, progress=show)
        if view:
            view.show({"event": "note", "text": str(out)})
