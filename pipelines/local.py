"""Run the compiled training pipeline with KFP's SubprocessRunner: `python -m mar_grpo.pipelines.local PARAMETERS ROOT`.

Started by `mar_grpo.launch.pipeline`, which shows the steps' events and ends this process and its steps together.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

PIPELINE = Path(__file__).parent / "mar_grpo_training" / "pipeline.yaml"


def main(parameters: str, root: str) -> None:
    """Run the pipeline with the parameters in a JSON file; KFP's own artifacts lie under `root`."""
    from kfp import components, local

    signal.signal(signal.SIGINT, leave_after_the_step)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # the one who started this has died
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True)
    components.load_component_from_file(str(PIPELINE))(**json.loads(Path(parameters).read_text()))


def leave_after_the_step(*_: object) -> None:
    """Ctrl-C: the step got the signal too; training saves its state before it ends."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED)
    os._exit(130)


if __name__ == "__main__":
    main(*sys.argv[1:])
