"""An update rehearsed on the meta device: the model's own code on tensors with shapes and no values.

What is measured is what the real update would hold, tensor for tensor, because it is the same code that makes them:
trunk, head, diffusion steps, likelihood and decoder run here as they stand, and so does the backward pass. Two things
do depend on values and are replaced by their sizes: which tokens are uncertain (their number is known), and which
transitions an update draws (`memory` goes through the draws of the run, which are known beforehand). Not every AR step
is walked through: what a step takes is a largest of linear functions of the known tokens and of the tokens with a
trajectory, so the first and the last scored one bound all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from mar_grpo.algorithms.likelihood import HeadRows, score_rows
from mar_grpo.algorithms.trajectories import _draw
from mar_grpo.models.blocks import Block, PreNormBlock
from mar_grpo.models.policy import Conditioning, Policy
from mar_grpo.noise import draw_noise, with_hypothetical
from mar_grpo.rollout import Chain, Guided, RecordedStep, SamplingConfig, _at, denoise, schedule_of
from mar_grpo.training.live import Live

if TYPE_CHECKING:
    from mar_grpo.config import Recipe

Steps = Mapping[int, Sequence[int]]
PROMPT_TOKENS = 64  # Harmon pads packed prompts to a multiple of 64; an ordinary prompt fits the first


class OnMeta(TorchFunctionMode):
    """Context manager: new tensors are on the meta device, noise is not drawn, attention is the fused kernel's.

    Without the last, attention on the meta device is the textbook formula, which holds all pairs of tokens.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype)  # as the kernels are given it
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return fused(query, key, value, attn_mask=mask)[0]
        if func in (torch.randn, torch.randperm):
            kwargs.pop("generator", None)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Rows(HeadRows):
    """All rows of an AR step, the uncertain ones with their trajectories; `uncertain`: how many those are."""

    uncertain: int = 0

    def groups(self, everything: bool) -> Iterator[tuple[Tensor, bool, bool]]:
        yield torch.empty(len(self.main) - self.uncertain, dtype=torch.int64), True, False
        yield torch.empty(self.uncertain, dtype=torch.int64), True, True


@dataclass
class Peak:
    """Bytes of a part of an update above what lives throughout it: at its peak, and what of it is what."""

    bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)

    def see(self, total: int, **parts: int) -> None:
        """Keep the larger."""
        if total > self.bytes:
            self.bytes, self.parts = total, parts


class Rehearsal:
    """One micro-batch of a recipe.

    Args:
        policy: on the meta device, prepared by a `Learner` (what is trained requires a gradient).
        reference: the learner's.
        steps: AR step -> transitions that are scored.
    """

    def __init__(self, recipe: Recipe, policy: Policy, reference: Policy | None, steps: Steps) -> None:
        self.recipe, self.policy, self.reference, self.steps = recipe, policy, reference, steps
        self.algorithm = recipe.algorithm
        self.counts = policy.mask_schedule(recipe.sampling.ar_steps)
        self.done = [sum(self.counts[:i]) for i in range(len(self.counts))]

    # --- what is recorded ---------------------------------------------------------------------------------------------

    def width(self, index: int) -> int:
        """Tokens of an image that have a trajectory in a scored AR step."""
        return self.policy.num_tokens - self.done[index] if self.algorithm.scope == "unknown" else self.counts[index]

    def uncertain(self, tokens: int) -> int:
        """Of so many tokens, those with extra trajectories: the share, or those with a pixel among it."""
        config, pixels = self.algorithm.trajectories, self.policy.pixels_per_token
        if config.mode in ("off", "drop_topk"):
            return 0
        share = config.share if config.unit == "token" else 1 - (1 - config.share) ** pixels
        return max(1, int(tokens * share))

    def record(self, images: int, trunk_width: int) -> list[RecordedStep]:
        """What a rollout of so many images keeps for the update, as tensors."""
        length, channels, states = self.policy.num_tokens, self.policy.token_dim, self._transitions + 1
        order = torch.empty(images, length, dtype=torch.int64)
        recorded = []
        for index, scored in self.steps.items():
            wide = self.width(index)
            noise = torch.empty(states, images, wide, channels)  # the state before the first transition is a part of it
            kept = sorted({j + after for j in scored for after in (0, 1)})
            path = {j: noise[0] if j == 0 else torch.empty(images, wide, channels) for j in kept}
            final = path[states - 1] if states - 1 in path else torch.empty(images, wide, channels)
            std: dict[int, Any] = {}
            if self.algorithm.deviation == "recorded" and not self._fixed_deviation:
                std = {j: torch.empty(images, wide, channels) for j in scored}
            places = order[:, self.done[index] : self.done[index] + wide]
            canvas = torch.empty(images, length, channels), torch.empty(images, length, dtype=torch.bool)
            z = torch.empty(images, wide, trunk_width, dtype=self._dtype)
            chain = Chain(final, path, std)
            recorded.append(RecordedStep(index, *canvas, self.done[index], places, self.counts[index], chain, z))
        return recorded

    def extra(self, images: int) -> dict[int, Chain]:
        """Extra trajectories that an update keeps, by AR step (one of all steps where they are of whole images)."""
        config, found = self.algorithm.trajectories, dict[int, Chain]()
        for index in self.steps:
            whole = config.mode == "composite"
            if whole and found:
                found[index] = next(iter(found.values()))
                continue
            tokens = images * self.uncertain(self.policy.num_tokens if whole else self.width(index))
            scored = set().union(*self.steps.values()) if whole else self.steps[index]
            kept = {j + after for j in scored for after in (0, 1)} if tokens else ()
            shape = (config.count, tokens, self.policy.token_dim)
            found[index] = Chain(torch.empty(shape), {j: torch.empty(shape) for j in kept})
        return found

    def kept(self, images: int) -> int:
        """Bytes that an update keeps of so many images between rollout and gradient."""
        with torch.device("meta"), OnMeta():
            width = self._width(self.guided(self.policy, 1, self.recipe.sampling, unguided=True))
            with Live() as live:
                held = (self.record(images, width), self.extra(images), torch.empty(images, self.policy.num_tokens))
                size = live.now
        del held
        return size + self._old(images)

    def _old(self, images: int) -> int:
        """Bytes of the log-densities that more than one inner update needs, float32 an element."""
        if self.algorithm.inner_updates == 1:
            return 0
        count = self.algorithm.trajectories.count
        rows = sum(
            len(scored) * (self.width(i) + count * self.uncertain(self.width(i))) for i, scored in self.steps.items()
        )
        return 4 * images * rows * self.policy.token_dim

    @contextmanager
    def as_laid_out(self, precision: str, checkpointing: bool) -> Iterator[None]:
        """The policies with weights of this precision, and with blocks that make their activations again."""
        policies = [each for each in (self.policy, self.reference) if each is not None]
        networks = [each.transformer for each in policies]
        before = next(networks[0].parameters()).dtype
        for network in networks:
            network.to(getattr(torch, precision))
        blocks = [each for each in self.policy.transformer.modules() if isinstance(each, Block | PreNormBlock)]
        try:
            for block in blocks if checkpointing else ():
                again = partial(checkpoint, partial(_on_meta, block.forward), use_reentrant=False)
                block.forward = again  # type: ignore[method-assign]
            yield
        finally:
            for block in blocks if checkpointing else ():
                del block.forward
            for network in networks:
                network.to(before)

    @property
    def _transitions(self) -> int:
        return self.recipe.sampling.num_diffusion_steps

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.policy.transformer.parameters()).dtype

    @property
    def _fixed_deviation(self) -> bool:
        """Whether the schedule, not the head, says what a transition's deviation is."""
        schedule = schedule_of(self.policy, self.recipe.sampling)
        state = torch.empty(1, self.policy.token_dim)
        return isinstance(schedule.transition(0, state, torch.empty(1, 2 * self.policy.token_dim))[1], float)

    # --- rollout ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, images: int, sampling: SamplingConfig | None = None, *, recorded: bool = True) -> Peak:
        """Generation and decoding, above weights. `sampling`: another than training's, `recorded` False for a look."""
        sampling, found = sampling or self.recipe.sampling, Peak()
        steps = self.steps if recorded else {}
        counts = self.policy.mask_schedule(sampling.ar_steps)
        keys, length, channels = list(range(images)), self.policy.num_tokens, self.policy.token_dim
        live = Live()
        with torch.device("meta"), OnMeta(), live:
            guided = self.guided(self.policy, images, sampling)
            schedule = schedule_of(self.policy, sampling)
            order, noise = draw_noise(keys, length, channels, schedule.num_steps + 1)
            tokens, known = torch.zeros(images, length, channels), torch.zeros(images, length, dtype=torch.bool)
            mode = self.algorithm.trajectories.mode if recorded else "off"
            composite: list[Tensor | None] = [None, None]
            kept: list[RecordedStep] = []
            for index in self._walk(steps, counts):
                done, wide = sum(counts[:index]), recorded and self.algorithm.scope == "unknown" and index in steps
                places = order[:, done:] if wide else order[:, done : done + counts[index]]
                z = guided.latents(tokens, known, done, places)
                if mode in ("composite", "drop_topk") and composite[0] is None:
                    composite = [None if part is None else torch.zeros(images, length, part.shape[2]) for part in z]
                if recorded and not kept:
                    kept = self.record(images, z[0].shape[2])
                chosen = noise if not wide else with_hypothetical(noise, order, done + counts[index], keys, index)
                chosen = _at(chosen, places)
                predict = guided.predictor(guided.head_conditions(*z), guided.scale(done + counts[index]))
                path = denoise(predict, schedule, chosen[0], chosen[1:], scored=steps.get(index, ()))
                del path
            del order, noise, chosen, predict, z
            if mode != "off":
                self._trajectories(guided, kept, composite, keys)
            del composite
            pictures = self.policy.decode(tokens)
            found.see(live.peak, recorded=sum(_size(each) for each in kept))
            del pictures
        return found

    def _trajectories(
        self, guided: Guided, kept: list[RecordedStep], composite: list[Tensor | None], keys: list[int]
    ) -> None:
        config = self.algorithm.trajectories
        if config.guidance == "none":
            guided, composite = guided.unguided(), [composite[0], None]
        z, other = composite
        if config.mode == "per_step":
            widest = max(kept, key=lambda step: step.z.shape[1])
            z, other = widest.z, None if guided.uncond is None else torch.empty_like(widest.z)
        assert z is not None
        scored = sorted(set().union(*self.steps.values()))
        path = _draw(guided, z, other, None, keys, (2,), scored, config.count)
        extra = self.extra(len(keys))
        del path, extra

    def guided(self, policy: Policy, images: int, sampling: SamplingConfig, unguided: bool = False) -> Guided:
        """Policy under the prompts of so many images; prompts have the most tokens an ordinary one has."""
        prompts = -(-images // self.recipe.training.group_size)
        text = conditioning_of(policy, prompts)
        index = torch.zeros(images, dtype=torch.int64)
        return Guided.of(policy, text, sampling, unguided=unguided).rows(index)

    @staticmethod
    def _walk(steps: Steps, counts: Sequence[int]) -> list[int]:
        """The first and last scored AR steps, and the last and the widest of all."""
        scored = list(steps)
        widest = max(range(len(counts)), key=lambda i: counts[i])
        return sorted({*scored[:2], *scored[-1:], widest, len(counts) - 1})

    # --- update -------------------------------------------------------------------------------------------------------

    def update(self, images: int) -> Peak:
        """The gradient of one micro-batch, what was recorded of it included, above weights and gradients."""
        algorithm, sampling, found = self.algorithm, self.recipe.sampling, Peak()
        unguided = algorithm.likelihood_guidance == "none"
        live_bytes = Live()
        for parameter in self.policy.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)  # from before, as every later AR step finds it
        with torch.device("meta"), OnMeta(), live_bytes:
            prompts = -(-images // self.recipe.training.group_size)
            text, index = conditioning_of(self.policy, prompts), torch.zeros(images, dtype=torch.int64)
            anchor = None
            if self.reference is not None:
                with torch.no_grad():
                    anchor = Guided.of(self.reference, text, sampling, unguided=unguided)
            live = Guided.of(self.policy, text, sampling, unguided=unguided)
            leaves = live.leaves()
            condition = live_bytes.now
            extra = self.extra(images)
            schedule = schedule_of(self.policy, sampling)
            walk = list(dict.fromkeys([*list(self.steps)[:2], list(self.steps)[-1]]))
            width = self._width(leaves.rows(index))
            recorded = self.record(images, width)
            kept = live_bytes.now - condition
            for step in (each for each in recorded if each.index in walk):
                live_bytes.peak = before = live_bytes.now
                canvas = (step.tokens.clone(), step.known.clone(), step.num_known, step.places.clone())
                latents = leaves.rows(index).latents(*canvas)
                conditions = live.head_conditions(*latents)
                targets = None
                if anchor is not None:
                    with torch.no_grad():
                        targets = anchor.head_conditions(*anchor.rows(index).latents(*canvas))
                whole = [torch.zeros_like(part) for part in conditions]
                trunk = live_bytes.now - before
                scale = live.scale(step.num_known + step.num_committed)
                _, gradients = score_rows(
                    live, whole, anchor, targets, scale, self._rows(step, extra[step.index]),
                    schedule, list(self.steps[step.index])[:1], 1.0, {},
                    algorithm.model_copy(update={"inner_updates": 1, "clip": None}),
                )  # fmt: skip
                if conditions[0].requires_grad:
                    torch.autograd.backward(conditions, [gradient + 0 for gradient in gradients])
                rest = live_bytes.peak - kept - condition - trunk
                found.see(live_bytes.peak, recorded=kept, condition=condition, trunk=trunk, head=rest)
            live_bytes.peak = live_bytes.now
            live.backward_through(leaves)
            found.see(live_bytes.peak, recorded=kept, condition=live_bytes.peak - kept)
        for parameter in self.policy.parameters():
            parameter.grad = None
        return found

    @torch.no_grad()
    def _width(self, guided: Guided) -> int:
        """D."""
        length, channels = self.policy.num_tokens, self.policy.token_dim
        canvas = torch.empty(1, length, channels), torch.zeros(1, length, dtype=torch.bool)
        one = Guided(self.policy, guided.cond[:1], None, guided.sampling)
        return one.latents(*canvas, 0, torch.zeros(1, 1, dtype=torch.int64))[0].shape[2]

    def _rows(self, step: RecordedStep, extra: Chain) -> Rows:
        images, wide, _ = step.path.final.shape
        config, pixels = self.algorithm.trajectories, self.policy.pixels_per_token
        units = pixels if "pixel" in (config.unit, self.algorithm.selection.unit) else 1
        weights = torch.empty(images * wide, units)
        some = images * self.uncertain(wide)
        return Rows(
            step.index, wide, step.path, weights, extra, weights.clone() if some else None,
            torch.zeros(images * wide, dtype=torch.int64) if some else None, uncertain=some,
        )  # fmt: skip


def conditioning_of(policy: Policy, prompts: int) -> Conditioning:
    """What so many prompts say, on the meta device."""
    network: Any = policy.transformer
    if hasattr(network, "text_embed"):  # NOVA
        config = network.config
        text = torch.empty(prompts, config.text_token_len, config.text_token_dim)
    elif hasattr(network, "llm"):  # Harmon
        llm = network.llm.config
        heads = llm.num_key_value_heads * getattr(llm, "head_dim", llm.hidden_size // llm.num_attention_heads)
        width = 2 * llm.num_hidden_layers * heads + 1
        text = torch.empty(prompts, PROMPT_TOKENS, width, dtype=network.llm.model.embed_tokens.weight.dtype)
    else:  # MAR
        text = torch.empty(prompts, 1, 1, dtype=torch.int64)
    return Conditioning(text, torch.empty_like(text[0]))


def _size(step: RecordedStep) -> int:
    """Bytes of what is recorded of an AR step (its places are a part of the order)."""
    parts = [step.tokens, step.known, step.z, step.path.final, *step.path.states.values()]
    parts += [part for part in step.path.std.values() if isinstance(part, Tensor)]
    storages = {id(storage): storage.nbytes() for storage in (part.untyped_storage() for part in parts)}
    return sum(storages.values())


def _on_meta(forward: Callable[..., Any], *args: Any) -> Any:
    """A call inside OnMeta: what a backward pass makes again is outside every mode otherwise."""
    with OnMeta():
        return forward(*args)
