"""A recipe that is over in seconds, on a meaningless checkpoint that knows the words of the emoji prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mar_grpo.data.scenes import vocabulary
from mar_grpo.models.checkpoint import save_policy
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.text import make_word_tokenizer
from tests.unit import tiny


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the published layout: 64 x 64 px, 16 tokens, random weights."""
    tokenizer = make_word_tokenizer(vocabulary())
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    policy = NovaPolicy.from_configs(
        tiny.TRANSFORMER | {"image_size": [64, 64], "image_stride": 8, "text_token_len": 12},
        tiny.VAE | blocks | {"block_out_channels": [8, 8, 8, 8]},
        tiny.TEXT | {"vocab_size": tokenizer.get_vocab_size()},
        tokenizer,
        tiny.FLOW,
        torch.Generator().manual_seed(0),
    )
    return save_policy(policy, tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture(scope="session")
def short_recipe(small_checkpoint: Path) -> str:
    """The recipe as JSON text."""
    sampling = {"ar_steps": 4, "diffusion_steps": 3}
    content: dict[str, Any] = {
        "name": "short",
        "checkpoint": {"uri": str(small_checkpoint)},
        "data": {"train_prompts": 12, "evaluation_prompts": 12},
        "sampling": sampling,
        "evaluation_sampling": sampling,
        "training": {
            "updates": 6, "prompts_per_update": 4, "group_size": 2, "micro_batch": 4, "processes": 2, "save_every": 1,
            "held_out_every": 3, "held_out_prompts": 6, "health": {"patience": 50},
        },
    }  # fmt: skip
    return json.dumps(content)
