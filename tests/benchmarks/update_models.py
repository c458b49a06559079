"""Models of `tests.benchmarks.update`: the published ones in miniature, random weights.

What decides where a step's operations go is kept: operations of the head on a token against those of the trunk on a
token, the language model against MAR, condition tokens and text against image tokens, attention against matrix
products, transitions, trajectories, scored AR steps of all AR steps, the share of tokens that are unknown. Depth, width
and the number of tokens are smaller; `Size.proportions` is printed beside the published model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.nova import NovaConfig
from mar_grpo.models.policy import Policy
from mar_grpo.models.vae import Vae
from mar_grpo.rollout import SamplingConfig
from tests.unit import tiny

BLOCK = ["DownEncoderBlock2D"], ["UpDecoderBlock2D"]


@dataclass(frozen=True)
class Size:
    """A model with what is asked of it."""

    family: str
    name: str
    make: Callable[[], Policy]
    sampling: SamplingConfig
    algorithm: AlgorithmConfig
    group: int
    proportions: dict[str, float]


def vae(channels: int, stride: int) -> dict[str, object]:
    blocks = stride.bit_length()
    return tiny.VAE | {
        "block_out_channels": [16] * blocks, "down_block_types": BLOCK[0] * blocks,
        "up_block_types": BLOCK[1] * blocks, "latent_channels": channels,
    }  # fmt: skip


def nova_transformer(grid: int, width: int, heads: int, depth: int, head: tuple[int, int]) -> dict[str, object]:
    """`transformer/config.json`; `depth` is the image encoder's, twice that of the video encoder."""
    return tiny.TRANSFORMER | {
        "image_size": [16 * grid] * 2, "image_stride": 8, "image_base_size": [grid] * 2,
        "video_base_size": [1, grid // 2, grid // 2], "text_token_len": grid * grid // 4, "text_token_dim": 16,
        "arch": [f"vit_d{depth // 2}w{width}", f"vit_d{depth}w{width}", f"mlp_d{head[0]}w{head[1]}"],
        "num_heads": heads,
    }  # fmt: skip


def nova_policy(transformer: dict[str, object]) -> Policy:
    return ready(tiny.policy(transformer=transformer, vae=vae(4, 8)))


def nova_proportions(transformer: dict[str, object]) -> dict[str, float]:
    """See `Size`."""
    given = NovaConfig.from_dict(dict(transformer))
    (video, width), (image, _), (depth, wide) = given.vit("video"), given.vit("image"), given.head_size
    frame = given.video_base_size[1] * given.video_base_size[2]
    token = head_operations(depth, wide, given.token_dim, given.token_dim)
    tokens = given.num_tokens + frame
    rows = (frame + 0.36 * given.num_tokens + tokens) / 2  # the mean of both halves; 36 % of the tokens are known
    trunk = image * 24 * width**2 * rows
    attention = image * 4 * width * ((frame + 0.36 * given.num_tokens) ** 2 + tokens**2) / 2
    text = given.text_token_len + frame
    return {
        "head on all tokens / trunk": token * given.num_tokens / (trunk + attention),
        "attention / trunk": attention / (trunk + attention),
        "condition / trunk": video * (24 * width**2 + 4 * width * text) * text / (trunk + attention),
    }


def harmon_config(grid: int, width: int, depth: int, heads: int, llm: tuple[int, int, int], head: tuple[int, int]) -> (
    dict[str, object]
):  # fmt: skip
    """config.json; `depth` is MAR's encoder's and decoder's, `llm` layers, width and width inside."""
    layers, hidden, inner = llm
    language = {
        "model_type": "qwen2", "vocab_size": 64, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 192,
        "max_position_embeddings": 2048, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder")
             for key, value in (("embed_dim", width), ("depth", depth), ("num_heads", heads))}  # fmt: skip
    mar = {"img_size": 16 * grid, "vae_stride": 16, "vae_embed_dim": 16, "buffer_size": grid * grid // 16}
    return {"llm": language, "mar": mar | sides | {"diffloss_d": head[0], "diffloss_w": head[1]}}


def harmon_policy(config: dict[str, object]) -> Policy:
    draw = torch.Generator().manual_seed(0)
    network = Harmon(HarmonConfig.from_dict(config), draw)
    return ready(HarmonPolicy(network, Vae.from_config(vae(16, 16), draw), tiny.tokenizer()))


def harmon_proportions(config: dict[str, object]) -> dict[str, float]:
    """See `Size`."""
    given = HarmonConfig.from_dict(config)
    mar, llm = given.mar, given.llm
    width, hidden = mar.encoder_embed_dim, llm["hidden_size"]
    keys = hidden * llm["num_key_value_heads"] // llm["num_attention_heads"]
    layer = 2 * hidden * (2 * hidden + 2 * keys + 3 * llm["intermediate_size"])
    visible, everything = mar.buffer_size + 0.36 * mar.num_tokens, mar.buffer_size + mar.num_tokens
    encoder, decoder = (mar.encoder_depth * (24 * width**2 + 4 * width * rows) * rows for rows in (visible, everything))
    language = llm["num_hidden_layers"] * (layer + 4 * hidden * visible) * visible
    head = head_operations(mar.diffloss_d, mar.diffloss_w, mar.token_dim, 2 * mar.token_dim)
    trunk = encoder + decoder + language
    return {"head on all tokens / trunk": head * mar.num_tokens / trunk, "language model / trunk": language / trunk,
            "decoder / trunk": decoder / trunk}  # fmt: skip


def head_operations(depth: int, width: int, inside: int, outside: int) -> float:
    """Of one evaluation for one token, its condition projected beforehand."""
    return 2 * width * (inside + depth * 5 * width + 2 * width + outside)


def ready(policy: Policy) -> Policy:
    """The trunk trains; layers that training starts at zero are filled, so that the head speaks."""
    draw = torch.Generator().manual_seed(1)
    for parameter in policy.transformer.parameters():
        if not parameter.any():
            scale = 0.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.data.normal_(0.0, scale, generator=draw)
    policy.eval().requires_grad_(False)
    for parameter in policy.trunk_parameters():
        parameter.requires_grad_(True)
    return policy


def reference_of(policy: Policy) -> Policy:
    """A policy a little away, so that the KL and its gradient are something."""
    reference = policy.frozen_copy()
    for parameter in reference.trunk_parameters():
        parameter.data.mul_(1.01)
    return reference


NOVA_SAMPLING = SamplingConfig(ar_steps=64, diffusion_steps=25, guidance_scale=5.0)
HARMON_SAMPLING = SamplingConfig(ar_steps=64, diffusion_steps="ddim25", guidance_scale=3.0)
PUBLISHED = {
    "nova": nova_proportions(nova_transformer(32, 1024, 16, 32, (6, 1024))),
    "harmon": harmon_proportions(harmon_config(32, 1280, 20, 16, (28, 1536, 8960), (12, 1536))),
}


def nova(name: str, *sizes: object, group: int, sampling: SamplingConfig = NOVA_SAMPLING, **changes: object) -> Size:
    transformer = nova_transformer(*sizes)  # type: ignore[arg-type]
    config = AlgorithmConfig.model_validate({"preset": "released", **changes})
    made = partial(nova_policy, transformer)
    return Size("nova", name, made, sampling, config, group, nova_proportions(transformer))


def harmon(
    name: str, *sizes: object, group: int, sampling: SamplingConfig = HARMON_SAMPLING, **changes: object
) -> Size:
    config = harmon_config(*sizes)  # type: ignore[arg-type]
    algorithm = AlgorithmConfig.model_validate({"preset": "released_harmon", **changes})
    return Size("harmon", name, partial(harmon_policy, config), sampling, algorithm, group, harmon_proportions(config))


SIZES = {
    "nova": {
        "small": nova("NOVA small", 10, 96, 3, 8, (2, 72), group=2),
        "large": nova("NOVA large", 14, 192, 6, 8, (2, 148), group=2),
    },
    "harmon": {
        "small": harmon("Harmon small", 10, 96, 4, 3, (3, 192, 704), (2, 112), group=2),
        "large": harmon("Harmon large", 12, 192, 4, 6, (6, 192, 1472), (2, 220), group=2),
    },
}
