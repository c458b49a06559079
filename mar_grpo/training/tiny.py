"""Builds the untrained start of the shipped checkpoint: a small NOVA around a trained autoencoder.

    python -m mar_grpo.training.tiny --vae build/vae --out build/base
    python -m mar_grpo.training.tiny --vae build/emoji-6/vae --pictures build/emoji-6 --out build/fresh

16 image tokens of 32 numbers (latent 8 x 8 x 8, patch 2 by the published rule), 4 condition tokens, 2.5 M parameters.
The text encoder is a two-layer Phi that knows the words of the emoji prompts; SFT trains it too, once.

With `--pictures` what draws (image encoder, head) comes from a trained checkpoint and what reads starts anew: a reader
that has learnt to look at names only hardly ever learns relations.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from mar_grpo.data.scenes import vocabulary
from mar_grpo.models.checkpoint import load_policy, save_policy
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.text import make_word_tokenizer

WIDTH = 128
DRAWS = ("image_encoder.", "image_decoder.", "mask_embed.mask_token")
TRANSFORMER = {
    "_class_name": "NOVATransformer3DModel",
    "image_dim": 8,
    "image_size": [64, 64],
    "image_stride": 8,
    "image_base_size": [4, 4],
    "video_base_size": [1, 2, 2],
    "text_token_dim": 96,
    "text_token_len": 12,
    "rotary_pos_embed": False,
    "arch": [f"vit_d2w{WIDTH}", f"vit_d6w{WIDTH}", "mlp_d3w192"],
    "num_heads": 4,
}
TEXT = {
    "model_type": "phi",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 64,
}
SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}


def build(vae: Path, out: Path, seed: int, pictures: Path | None = None) -> None:
    """Write the untrained folder in the published layout; `pictures`: a checkpoint whose drawing part is kept."""
    trained = AutoencoderKL.from_pretrained(vae)
    tokenizer = make_word_tokenizer(vocabulary())
    config = {key: value for key, value in trained.config.items() if not key.startswith("_")}
    generator = torch.Generator().manual_seed(seed)
    text = TEXT | {"vocab_size": tokenizer.get_vocab_size()}
    policy = NovaPolicy.from_configs(TRANSFORMER, config, text, tokenizer, SCHEDULER, generator)
    policy.transformer.initialise_parameters(generator, residual_norm_gain=0.5)
    policy.vae.model.load_state_dict(trained.state_dict())
    if pictures is not None:
        tensors = load_policy(pictures).transformer.state_dict()
        kept = {name: value for name, value in tensors.items() if name.startswith(DRAWS)}
        policy.transformer.load_state_dict(kept, strict=False)
    save_policy(policy, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.vae, arguments.out, arguments.seed, arguments.pictures)
