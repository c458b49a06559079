"""The smallest policies of the MAR and Harmon families whose parts all do something."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer

from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.mar import Mar, MarConfig, MarPolicy
from mar_grpo.models.text import make_word_tokenizer
from mar_grpo.models.vae import harmon_bytes, mar_bytes

KL16: dict[str, Any] = {
    "ch": 32,
    "ch_mult": [1, 1, 1],
    "num_res_blocks": 1,
    "z_channels": 4,
    "embed_dim": 4,
    "resolution": 64,
}
MAR: dict[str, Any] = {
    "img_size": 16,
    "vae_stride": 4,
    "vae_embed_dim": 4,
    "encoder_embed_dim": 16,
    "encoder_depth": 1,
    "encoder_num_heads": 2,
    "decoder_embed_dim": 16,
    "decoder_depth": 1,
    "decoder_num_heads": 2,
    "class_num": 5,
    "buffer_size": 4,
    "diffloss_d": 1,
    "diffloss_w": 16,
    "num_sampling_steps": "10",
}
LLM: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def tokenizer() -> Tokenizer:
    return make_word_tokenizer(["generate an image : . a red apple dog < | im_start im_end > user assistant"])


def mar(seed: int = 0, class_names: dict[str, int] | None = None) -> MarPolicy:
    generator = torch.Generator().manual_seed(seed)
    network = Mar(MarConfig.from_dict(MAR))
    network.initialise_parameters(generator)
    return MarPolicy(network, Kl16(Kl16Config.from_dict(KL16), mar_bytes, generator), class_names).eval()


def harmon(seed: int = 0) -> HarmonPolicy:
    generator = torch.Generator().manual_seed(seed)
    network = Harmon(HarmonConfig.from_dict({"llm": LLM, "mar": MAR}), generator)
    vae = Kl16(Kl16Config.from_dict(KL16), harmon_bytes, generator)
    return HarmonPolicy(network, vae, tokenizer()).eval()
