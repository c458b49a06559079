"""The KFP pipeline on this machine, run by a child process that has kfp; this one shows how it goes.

The child (`mar_grpo.pipelines.local`) and the steps it starts are one process group, which ends with this process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mar_grpo.errors import MarGrpoError
from mar_grpo.launch import processes
from mar_grpo.launch.failures import CLASSES
from mar_grpo.progress import Event, parse
from mar_grpo.runs import WORK

MORE_SECONDS = 15.0
"""What the step's own process may take beside its training processes."""


def run_pipeline(
    parameters: Mapping[str, Any], *, work: Path, show: Callable[[Event], None], grace_seconds: float
) -> None:
    """Run pipelines/mar_grpo_training with KFP's SubprocessRunner to its end.

    Args:
        parameters: of the pipeline.
        work: local folder: `pipeline.log` takes all that is no event, the rest is scratch space.
        show: gets every event as it happens.
        grace_seconds: what training needs at most to save when it is stopped.

    Raises:
        MarGrpoError: a step failed; with the error, so the exit code, that it had there.
    """
    scratch, artifacts = work / "tmp", work / "kfp"
    for folder in (scratch, artifacts):  # KFP's artifacts are copies of what lies in the store
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    log_path = work / "pipeline.log"
    (work / "parameters.json").write_text(json.dumps(dict(parameters)))
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch), WORK: str(work / "steps")}
    command = [sys.executable, "-m", "mar_grpo.pipelines.local", str(work / "parameters.json"), str(artifacts)]
    failure: Event | None = None
    with open(log_path, "w", encoding="utf-8") as log:
        child = processes.start(command, environment=environment, output=subprocess.PIPE)
        try:
            assert child.stdout is not None
            for line in iter(child.stdout.readline, b""):
                text = line.decode(errors="replace")
                event = parse(text)
                if event is None:
                    log.write(text)
                    log.flush()
                elif event["event"] == "failure":
                    failure = failure or event
                else:
                    show(event)
            processes.wait(child)
        finally:
            code = processes.stop(child, grace_seconds=grace_seconds + MORE_SECONDS, first=signal.SIGINT)
            shutil.rmtree(scratch, ignore_errors=True)
    if failure is not None:
        raise CLASSES.get(failure["exit_code"], MarGrpoError)(f"{failure['step']}: {failure['error']}")
    if code:
        raise MarGrpoError(f"the pipeline ended with exit code {code}", where=str(log_path), hint="see that file")
