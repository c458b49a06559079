"""The smallest policies whose parts all do something (fast to build, meaningless pictures)."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer

from mar_grpo.models.mar import Mar, MarConfig, MarPolicy
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.text import make_word_tokenizer
from mar_grpo.models.vae import Vae

WORDS = ["a", "photo", "of", "two", "red", "apple", "apples", "dog", "and", "circle", "left", "right", "above", "below"]

TRANSFORMER: dict[str, Any] = {
    "_class_name": "NOVATransformer3DModel",
    "image_dim": 4,
    "image_size": [32, 32],
    "image_stride": 4,
    "text_token_dim": 16,
    "text_token_len": 8,
    "image_base_size": [4, 4],
    "video_base_size": [1, 2, 2],
    "arch": ["vit_d2w16", "vit_d4w16", "mlp_d2w16"],
    "num_heads": 2,
    "patch_size": 2,
}
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "scaling_factor": 0.5,
}
TEXT: dict[str, Any] = {
    "model_type": "phi",
    "architectures": ["PhiModel"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "vocab_size": 20,
}
FLOW: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
MAR: dict[str, Any] = {
    "img_size": 16,
    "vae_stride": 4,
    "vae_embed_dim": 4,
    "encoder_embed_dim": 16,
    "encoder_depth": 2,
    "encoder_num_heads": 2,
    "decoder_embed_dim": 24,
    "decoder_depth": 2,
    "decoder_num_heads": 2,
    "class_num": 5,
    "buffer_size": 3,
    "diffloss_d": 2,
    "diffloss_w": 16,
}


def tokenizer() -> Tokenizer:
    return make_word_tokenizer(WORDS)


def policy(seed: int = 0, **changes: dict[str, Any]) -> NovaPolicy:
    """A policy from a seed; `transformer`, `vae`, `text` change keys of its configurations, `scheduler` replaces it."""
    parts = {"transformer": TRANSFORMER, "vae": VAE, "text": TEXT, "scheduler": changes.get("scheduler", FLOW)}
    configs = {name: config | changes.get(name, {}) for name, config in parts.items()}
    return NovaPolicy.from_configs(
        **configs, tokenizer=tokenizer(), generator=torch.Generator().manual_seed(seed)
    ).eval()


def mar_policy(seed: int = 0, **changes: Any) -> MarPolicy:
    """A MAR policy from a seed, in eval mode; layers that training starts at zero are filled, so the head speaks."""
    generator = torch.Generator().manual_seed(seed)
    transformer = Mar(MarConfig.from_dict(MAR | changes))
    transformer.initialise_parameters(generator)
    for parameter in transformer.parameters():
        if not parameter.any():
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return MarPolicy(transformer, Vae.from_config(VAE, generator), {"goldfish": 1}).eval()
