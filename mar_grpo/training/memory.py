"""How much memory a process of a recipe's training takes, before it starts: from shapes, nothing fitted.

    throughout   weights of all parts, gradients and optimiser state of what is trained, reference, average, what was
                 recorded of the other micro-batches (an update keeps all its images until it steps)
    rollout      generating and decoding one micro-batch: trunk, head, noise, extra trajectories, what is recorded
    update       the gradient of one micro-batch: the trunk's activations, the head's chunks, the recorded states
    step         what the exchange of gradients and the optimiser hold beside their own
    look         pictures of held-out prompts, `evaluation_sampling.batch_size` at once

The peak is the first and the largest of the others. Those are measured in a `Rehearsal`. Not counted: what a kernel
takes for itself, the CUDA context and what an allocator rounds up (leave a reserve), and scorers of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from mar_grpo.algorithms.steps import choose_steps
from mar_grpo.models.policy import Policy
from mar_grpo.rollout import schedule_of
from mar_grpo.training.learner import Learner
from mar_grpo.training.rehearsal import OnMeta, Peak, Rehearsal, Steps

if TYPE_CHECKING:
    from mar_grpo.config import Recipe

GIB = 2**30
Parallel = Literal["ddp", "fsdp"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Layout:
    """How training lies on machines.

    Args:
        processes: with a GPU each.
        micro_batch: images a process rolls out and scores at once.
        parallel: `ddp`, every process has all weights; `fsdp`, what the trained network has, its gradients and its
            optimiser state are dealt out to the processes, and one block at a time is whole.
        precision: of the weights in the network; bfloat16 has float32 ones beside what is trained (in the optimiser).
        checkpointing: a block's activations are made again in the backward pass.
    """

    processes: int = 1
    micro_batch: int = 128
    parallel: Parallel = "ddp"
    precision: Precision = "float32"
    checkpointing: bool = False


@dataclass(frozen=True)
class Estimate:
    """Bytes of one process: `always` and `phases` by name; the peak is all of the first and the largest of the rest."""

    layout: Layout
    always: Mapping[str, int]
    phases: Mapping[str, Peak]

    @property
    def phase(self) -> str:
        """Where the peak is."""
        return max(self.phases, key=lambda name: self.phases[name].bytes)

    @property
    def bytes(self) -> int:
        """The peak."""
        return sum(self.always.values()) + self.phases[self.phase].bytes


class Planner:
    """Estimates of one recipe with one model.

    Args:
        policy: on the meta device (`models.outlines.outline`); it becomes the learner's and is not to be used again.

    Raises:
        InputError: the model lacks the part that is trained.
    """

    def __init__(self, recipe: Recipe, policy: Policy) -> None:
        self.recipe, self.policy = recipe, policy
        with torch.device("meta"), OnMeta():
            self.learner = Learner(recipe, policy, torch.device("meta"))
        self._found: dict[tuple[Any, ...], Estimate] = {}

    def draws(self) -> Steps:
        """The scored steps of the update that records most, of all of the run: they are known beforehand."""
        recipe, algorithm = self.recipe, self.recipe.algorithm
        counts = self.policy.mask_schedule(recipe.sampling.ar_steps)
        schedule = schedule_of(self.policy, recipe.sampling)
        left = [sum(counts[i:]) if algorithm.scope == "unknown" else counts[i] for i in range(len(counts))]
        drawn = (
            choose_steps(
                algorithm.scored_ar_steps, algorithm.scored_diffusion_steps, seed=recipe.seed, update=update,
                num_ar_steps=len(counts), schedule=schedule,
            )
            for update in range(recipe.training.updates)
        )  # fmt: skip
        return max(drawn, key=lambda steps: (sum(left[i] for i in steps), -next(iter(steps))))

    def estimate(self, layout: Layout, steps: Steps | None = None) -> Estimate:
        """Of one process.

        Args:
            steps: what the update scores; None: the most that any update of the run does.
        """
        key = (layout, repr(steps))
        if key not in self._found:
            self._found[key] = self._estimate(layout, steps or self.draws())
        return self._found[key]

    def _estimate(self, layout: Layout, steps: Steps) -> Estimate:
        training = self.recipe.training
        images = -(-training.prompts_per_update * training.group_size // layout.processes)
        at_once = min(layout.micro_batch, images)
        rehearsal = Rehearsal(self.recipe, self.policy, self.learner.reference, steps)
        with rehearsal.as_laid_out(layout.precision, layout.checkpointing):
            phases = {"rollout": rehearsal.rollout(at_once), "update": rehearsal.update(at_once)}
            kept = rehearsal.kept(images)
            mine = rehearsal.kept(at_once)
            if training.held_out_every:
                sampling = self.recipe.evaluation_sampling
                shown = min(sampling.batch_size, -(-training.held_out_prompts // layout.processes))
                look = rehearsal.rollout(shown, sampling, recorded=False)
                phases["look"] = Peak(look.bytes - kept, {"pictures": look.bytes})  # nothing is recorded then
        phases["step"] = Peak(mine + self._step(layout), {"recorded": mine, "step": self._step(layout)})
        return Estimate(layout, self._always(layout) | {"recorded, other micro-batches": kept - mine}, phases)

    def _always(self, layout: Layout) -> dict[str, int]:
        """Bytes of weights and what belongs to them."""
        learner, policy = self.learner, self.policy
        width = 2 if layout.precision == "bfloat16" else 4
        share = layout.processes if layout.parallel == "fsdp" else 1
        trained = sum(parameter.numel() for parameter in learner.trained)
        network = _numbers(policy.transformer)
        reference = 0
        if learner.reference is not None:
            own = {id(tensor) for tensor in _tensors(policy)}
            reference = sum(tensor.numel() for tensor in _tensors(learner.reference) if id(tensor) not in own)
        moments = {"adamw": 2, "sgd": int(self.recipe.optimizer.beta1 > 0)}[self.recipe.optimizer.kind]
        master = 1 if width == 2 else 0  # float32 weights of what is trained
        average = sum(value.numel() for value in learner.average.average.values()) if learner.average else 0
        found = {
            "network": width * network // share,
            "reference": width * reference // share,
            "frozen parts": 4 * (_numbers(policy) - network),
            "gradients": 4 * trained // share,
            "optimiser": 4 * (moments + master) * trained // share,
            "average of the head": 4 * average,
        }
        if layout.parallel == "fsdp":  # the block that is whole and the one that is fetched meanwhile
            found["gathered blocks"] = 2 * width * max(map(_numbers, _blocks(policy)))
        return {name: size for name, size in found.items() if size}

    def _step(self, layout: Layout) -> int:
        """Bytes beside: all gradients in one message; or AdamW's denominator, of all parameters in one call."""
        share = layout.processes if layout.parallel == "fsdp" else 1
        trained = 4 * sum(parameter.numel() for parameter in self.learner.trained) // share
        message = trained if layout.processes > 1 and layout.parallel == "ddp" else 0
        return max(message, trained if self.recipe.optimizer.kind == "adamw" else 0)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _numbers(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in _tensors(module))


def _blocks(policy: Policy) -> Sequence[nn.Module]:
    """What is dealt out as one: the layers of the network's lists."""
    return [block for each in policy.transformer.modules() if isinstance(each, nn.ModuleList) for block in each]
