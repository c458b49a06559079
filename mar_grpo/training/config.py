"""How a training run is laid out: its length, its width, and what watches over it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mar_grpo.training.health import HealthConfig
from mar_grpo.training.lora import LoraConfig
from mar_grpo.training.state import KeepConfig


class TrainingConfig(BaseModel):
    """How long and how wide.

    Args:
        prompts_per_update, group_size: a group is one prompt's images; both over all processes.
        micro_batch: images a process rolls out and scores at once; bounds memory, changes no number but rounding.
        processes: torchrun processes on this machine; threads: CPU threads each (None: torch decides).
        save_every: updates between saved states; keep: which of them stay.
        held_out_every: updates between looks at held-out prompts (for the curves only; nothing is chosen by them),
            0 for none; held_out_prompts: how many prompts, one image each.
        max_relaunches: how often in a row, without a new state between, the launcher goes on from the last state after
            an error that may pass.
        stop_grace_seconds: from SIGTERM or Ctrl-C to the end of the processes, half of it for the update under way.
        store_patience_seconds: how long a store that is away is waited for; training goes on with what it has.
        lora: adapters are trained instead of the part's own weights; None: its own weights.
        parallel: `ddp`, every process has the whole policy; `fsdp`, the trunk's blocks are shared out over the
            processes (FSDP2), whole during rollouts only. One process has the whole policy in either case.
        precision: of the transformer's weights; with `bfloat16`, gradients are summed and steps are made in float32.
        activation_checkpointing: the backward pass makes the activations inside the trunk's blocks again instead of
            keeping them: a third more work, the same numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    updates: int = Field(40, gt=0)
    prompts_per_update: int = Field(32, gt=0)
    group_size: int = Field(8, ge=2)
    micro_batch: int = Field(128, gt=0)
    processes: int = Field(2, gt=0)
    threads: int | None = Field(1, gt=0)
    save_every: int = Field(10, gt=0)
    keep: KeepConfig = KeepConfig()
    held_out_every: int = Field(10, ge=0)
    held_out_prompts: int = Field(100, gt=0)
    max_relaunches: int = Field(2, ge=0)
    stop_grace_seconds: float = Field(30.0, gt=0, allow_inf_nan=False)
    store_patience_seconds: float = Field(300.0, gt=0, allow_inf_nan=False)
    health: HealthConfig = HealthConfig()
    lora: LoraConfig | None = None
    parallel: Literal["ddp", "fsdp"] = "ddp"
    precision: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
