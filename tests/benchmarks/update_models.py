"""Models of `tests.benchmarks.update`: the published ones in miniature, random weights.

What decides where a step's operations go is kept: operations of the head on a token against those of the trunk on a
token, condition and language model against the rest, transitions, trajectories, scored AR steps of all AR steps, the
share of tokens that are unknown. Depth, width and the number of tokens are smaller; proportions are printed beside
those of the published model. Harmon has the 25 transitions that the released runs are named after; its configuration
says 100, and the ratio of the operations would be much the same (0.59 instead of 0.58 on paper).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mar_grpo.algorithms.config import AlgorithmConfig
from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.nova import NovaConfig
from mar_grpo.models.policy import Policy
from mar_grpo.models.vae import Vae
from mar_grpo.rollout import SamplingConfig
from tests.benchmarks import update_operations
from tests.benchmarks.update_operations import Network
from tests.unit import tiny

PROMPT_TOKENS = 64  # a packed prompt with its padding
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
    network: Network


def vae(channels: int, stride: int) -> dict[str, Any]:
    blocks = stride.bit_length()
    return tiny.VAE | {
        "block_out_channels": [16] * blocks, "down_block_types": BLOCK[0] * blocks,
        "up_block_types": BLOCK[1] * blocks, "latent_channels": channels,
    }  # fmt: skip


def nova_transformer(
    grid: int, width: int, heads: int, depth: int, head: tuple[int, int], text: int | None = None, text_dim: int = 16
) -> dict[str, Any]:
    """`transformer/config.json`; `depth` is the image encoder's, twice that of the video encoder; `text` tokens."""
    return tiny.TRANSFORMER | {
        "image_size": [16 * grid] * 2, "image_stride": 8, "image_base_size": [grid] * 2,
        "video_base_size": [1, grid // 2, grid // 2],
        "text_token_len": text or grid * grid // 4, "text_token_dim": text_dim,
        "arch": [f"vit_d{depth // 2}w{width}", f"vit_d{depth}w{width}", f"mlp_d{head[0]}w{head[1]}"],
        "num_heads": heads,
    }  # fmt: skip


def nova_policy(transformer: dict[str, Any]) -> Policy:
    return ready(tiny.policy(transformer=transformer, vae=vae(4, 8)))


def harmon_config(
    grid: int, width: int, heads: int, depth: int, llm: tuple[int, ...], head: tuple[int, int]
) -> dict[str, Any]:
    """config.json; `depth` is MAR's encoder's and decoder's; `llm`: layers, width, width inside, width of a head."""
    layers, hidden, inner, head_dim = (*llm, 32)[:4]
    language = {
        "model_type": "qwen2", "vocab_size": 64, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": hidden // head_dim // 6,
        "max_position_embeddings": 2048, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder")
             for key, value in (("embed_dim", width), ("depth", depth), ("num_heads", heads))}  # fmt: skip
    mar = {"img_size": 16 * grid, "vae_stride": 16, "vae_embed_dim": 16, "buffer_size": grid * grid // 16}
    return {"llm": language, "mar": mar | sides | {"diffloss_d": head[0], "diffloss_w": head[1]}}


def harmon_policy(config: dict[str, Any]) -> Policy:
    draw = torch.Generator().manual_seed(0)
    network = Harmon(HarmonConfig.from_dict(config), draw)
    policy = ready(HarmonPolicy(network, Vae.from_config(vae(16, 16), draw), tiny.tokenizer()))
    head = network.mar.diffloss.net
    wide, inside = head.input_proj.weight.shape
    echo = head.input_proj.weight.data.T * (inside / head.input_proj.weight.data.var()) ** 0.5 / wide
    noise = head.final_layer.linear.weight.data[:inside]
    noise.mul_(0.2).add_(echo)  # a state is mostly noise: else values would grow a hundredfold
    return policy


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


def nova(name: str, *sizes: Any, group: int, sampling: SamplingConfig = NOVA_SAMPLING, **changes: Any) -> Size:
    """Arguments as `nova_transformer`; changes of the algorithm."""
    transformer = nova_transformer(*sizes)
    config = AlgorithmConfig.model_validate({"preset": "released", **changes})
    network = update_operations.nova(NovaConfig.from_dict(dict(transformer)))
    return Size("nova", name, partial(nova_policy, transformer), sampling, config, group, network)


def harmon(name: str, *sizes: Any, group: int, sampling: SamplingConfig = HARMON_SAMPLING, **changes: Any) -> Size:
    """Arguments as `harmon_config`; changes of the algorithm."""
    config = harmon_config(*sizes)
    algorithm = AlgorithmConfig.model_validate({"preset": "released_harmon", **changes})
    network = update_operations.harmon(HarmonConfig.from_dict(config), PROMPT_TOKENS)
    return Size("harmon", name, partial(harmon_policy, config), sampling, algorithm, group, network)


PUBLISHED = {
    "nova": nova("NOVA d48w1024", 32, 1024, 16, 32, (6, 1024), 256, 2560, group=4),
    "harmon": harmon("Harmon-1.5B", 32, 1280, 16, 20, (28, 1536, 8960, 128), (12, 1536), group=4),
}
SIZES = {
    "nova": {
        "small": nova("NOVA small", 10, 96, 3, 8, (2, 76), group=2),
        "large": nova("NOVA large", 10, 512, 8, 4, (2, 268), group=2),
    },
    "harmon": {
        "small": harmon("Harmon small", 10, 96, 3, 4, (3, 192, 704), (2, 116), group=2),
        "large": harmon("Harmon large", 10, 384, 6, 2, (3, 576, 1856), (2, 328), group=2),
    },
}
