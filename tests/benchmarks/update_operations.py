"""What a step costs on paper, in operations (2 a multiply-add): the released way, and what cannot be avoided.

The formulas hold for every size; `update` prints what its counter found over them, and what they say of the published
models. A backward pass takes two products for each of the forward pass, one where the weight is frozen, and five for
attention's two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mar_grpo.models.harmon import HarmonConfig
from mar_grpo.models.nova import NovaConfig


@dataclass(frozen=True)
class Work:
    """Products with trained weights and with frozen ones, and attention."""

    trained: float = 0.0
    frozen: float = 0.0
    attention: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.trained + other.trained, self.frozen + other.frozen, self.attention + other.attention)

    def __mul__(self, factor: float) -> Work:
        return Work(factor * self.trained, factor * self.frozen, factor * self.attention)

    @property
    def forward(self) -> float:
        return self.trained + self.frozen + self.attention

    @property
    def backward(self) -> float:
        return 2 * self.trained + self.frozen + 2.5 * self.attention


@dataclass(frozen=True)
class Network:
    """A policy's price list.

    Attributes:
        tokens: L; condition: of a prompt; trunk: (known tokens, wanted tokens) -> of an image.
        body, modulation: of the head for one token at one transition: what depends on the state, and what does not.
        projection: of z to the head's condition, a token.
    """

    tokens: int
    condition: Work
    trunk: Callable[[int, int], Work]
    body: float
    modulation: float
    projection: float

    @property
    def head(self) -> float:
        """One evaluation."""
        return self.body + self.modulation

    def proportions(self) -> dict[str, float]:
        """What a miniature has to have in common with its model; 36 % of the tokens are known on average."""
        trunk = self.trunk(round(0.36 * self.tokens), self.tokens)
        return {
            "head on all tokens / trunk": self.tokens * self.head / trunk.forward,
            "modulation / head": self.modulation / self.head,
            "condition / trunk": self.condition.forward / trunk.forward,
            "frozen / trunk": trunk.frozen / trunk.forward,
        }


def nova(config: NovaConfig) -> Network:
    (video, width), (image, _), (depth, wide) = config.vit("video"), config.vit("image"), config.head_size
    _, rows, columns = config.video_base_size
    frame, text, tokens = rows * columns, config.text_token_len, config.num_tokens

    def trunk(known: int, wanted: int) -> Work:
        early, late = frame + known, frame + tokens
        work = _block(width, early) * (image // 2) + _block(width, late) * (image - image // 2 - 1)
        return work + _block(width, late, wanted) + Work(2 * config.token_dim * width * known)

    condition = _block(width, text + frame) * (video - 1) + _block(width, text + frame, frame)
    return Network(
        tokens,
        condition + Work(2 * config.text_token_dim * width * text),
        trunk,
        **_head(depth, wide, config.token_dim, config.token_dim),
        projection=2 * wide * (width + wide),
    )


def harmon(config: HarmonConfig, prompt: int) -> Network:
    """`prompt`: tokens of the padded prompt, as the language model's attention sees them."""
    mar, llm = config.mar, config.llm
    tokens, width, hidden = config.grid[0] * config.grid[1], mar.encoder_embed_dim, llm["hidden_size"]
    keys = hidden * llm["num_key_value_heads"] // llm["num_attention_heads"]
    layer = 2 * hidden * (2 * hidden + 2 * keys + 3 * llm["intermediate_size"])

    def trunk(known: int, wanted: int) -> Work:
        early, late = mar.buffer_size + known, mar.buffer_size + tokens
        encoder = _block(width, early) * mar.encoder_depth + Work(2 * mar.token_dim * width * known)
        bridge = Work(frozen=early * (4 * width * hidden + 4 * hidden**2))
        language = Work(frozen=layer * early, attention=4 * hidden * early * (early + prompt))
        decoder = _block(width, late) * (mar.decoder_depth - 1) + _block(width, late, wanted)
        return encoder + bridge + language * llm["num_hidden_layers"] + decoder + Work(2 * width**2 * early)

    return Network(
        tokens,
        Work(),
        trunk,
        **_head(mar.diffloss_d, mar.diffloss_w, mar.token_dim, 2 * mar.token_dim),
        projection=2 * width * mar.diffloss_w,
    )


def _block(width: int, rows: int, queries: int | None = None) -> Work:
    """A transformer block on so many rows; only `queries` of them come out."""
    out = rows if queries is None else queries
    return Work(width**2 * (20 * out + 4 * rows), attention=4 * width * out * rows)


def _head(depth: int, width: int, inside: int, outside: int) -> dict[str, float]:
    return {
        "body": 2 * width * (inside + depth * 2 * width + outside),
        "modulation": 2 * width * (depth * 3 * width + 2 * width),
    }


@dataclass(frozen=True)
class Plan:
    """What a step does.

    Attributes:
        counts: tokens that each AR step commits; steps: scored AR steps and their transitions.
        transitions: T; images: B of one prompt; trajectories: S.
        averaged: share of the unknown tokens of scored AR steps whose score is an average over trajectories.
        everywhere: the released head runs on all tokens at every AR step (NOVA).
        guided: trajectories are drawn with guidance (Harmon).
        first: AR step from which on selection looks back.
    """

    counts: Sequence[int]
    steps: Mapping[int, Sequence[int]]
    transitions: int
    images: int
    trajectories: int
    averaged: float
    everywhere: bool
    guided: bool
    first: int

    @property
    def unknown(self) -> list[int]:
        """Tokens that are unknown when each AR step starts."""
        return [sum(self.counts[i:]) for i in range(len(self.counts))]


def released(network: Network, plan: Plan) -> dict[str, float]:
    """Operations of each part as in `released_procedure`."""
    tokens, last = network.tokens, len(plan.counts) - 1
    trunks = [network.trunk(tokens - n, tokens) for n in plan.unknown]
    rows = sum(
        tokens if plan.everywhere or i in plan.steps or i + 1 in plan.steps or i == last else plan.counts[i]
        for i in range(len(plan.counts))
    )
    extra = 2 * tokens * plan.trajectories
    scored = [trunks[i] + network.condition for i in plan.steps]
    evaluations = sum(tokens * len(transitions) for transitions in plan.steps.values())
    return _times(plan.images, {
        "rollout, trunk": 2 * sum(work.forward for work in trunks) + 2 * network.condition.forward,
        "rollout, head": 2 * rows * (plan.transitions * network.head + network.projection),
        "rollout, trajectories": extra * (plan.transitions * network.head + network.projection),
        "update, trunk": sum(2 * work.forward + work.backward for work in scored),
        "update, head": evaluations * network.head * (2 * (1 + plan.trajectories) + 1)
        + 3 * network.projection * tokens * len(plan.steps),
    })  # fmt: skip


def needed(network: Network, plan: Plan) -> dict[str, float]:
    """Operations of each part that no order of the work avoids.

    Every number that enters the gradient once: z of the tokens that are asked for; hypothetical tokens where a scored
    AR step scores them or the selection looks back; modulations once for all trajectories of a token; the condition
    once a prompt. What is computed again all the same is the trunk at scored AR steps: the rollout keeps no graph.
    """
    tokens, unknown, steps = network.tokens, plan.unknown, range(len(plan.counts))
    wide = [i for i in steps if i in plan.steps or (i + 1 in plan.steps and i + 1 >= plan.first)]
    rows = [unknown[i] if i in wide else plan.counts[i] for i in steps]
    trunks = [network.trunk(tokens - unknown[i], rows[i]) for i in steps]
    extra = plan.transitions * (plan.trajectories * network.body + network.modulation) + network.projection
    scored = [unknown[i] for i in plan.steps]
    pairs = sum(unknown[i] * len(transitions) for i, transitions in plan.steps.items())
    live = network.head + plan.averaged * plan.trajectories * network.body
    condition = network.condition
    parts = _times(plan.images, {
        "rollout, trunk": 2 * sum(work.forward for work in trunks),
        "rollout, head": 2 * sum(rows) * (plan.transitions * network.head + network.projection),
        "rollout, trajectories": (1 + plan.guided) * tokens * extra,
        "update, trunk": sum(2 * trunks[i].forward + trunks[i].backward for i in plan.steps),
        "update, head": pairs * (2 * live + network.head) + 3 * network.projection * sum(scored),
    })  # fmt: skip
    parts["rollout, trunk"] += 2 * condition.forward
    parts["update, trunk"] += 2 * condition.forward + condition.backward
    return parts


def _times(factor: int, parts: dict[str, float]) -> dict[str, float]:
    return {name: factor * value for name, value in parts.items()}
