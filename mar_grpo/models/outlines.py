"""Policies without weights: every tensor has its shape, none has values (torch's meta device)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mar_grpo.errors import InputError
from mar_grpo.models.build import on_meta
from mar_grpo.models.checkpoint import fetch_checkpoint, load_policy
from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.mar import Mar, MarConfig, MarPolicy
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.models.published import QWENS
from mar_grpo.models.text import make_word_tokenizer
from mar_grpo.models.vae import harmon_bytes, mar_bytes

SCHEME = "published://"
MARS = {"mar-base": "mar_base", "mar-large": "mar_large", "mar-huge": "mar_huge"}
HARMONS = {"harmon-0.5b": ("Qwen2.5-0.5B-Instruct", "mar_base"), "harmon-1.5b": ("Qwen2.5-1.5B-Instruct", "mar_huge")}
NOVA = "nova-d48w1024-sd512"
_TRANSFORMER = {
    "image_dim": 4, "image_size": [512, 512], "image_stride": 8, "text_token_dim": 2560, "text_token_len": 256,
    "image_base_size": [32, 32], "video_base_size": [1, 16, 16],
    "arch": ["vit_d16w1024", "vit_d32w1024", "mlp_d6w1024"],
}  # fmt: skip
_STABLE_DIFFUSION_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 4,
    "scaling_factor": 0.18215,
}  # fmt: skip
_PHI_2 = {
    "model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048, "partial_rotary_factor": 0.4,
}  # fmt: skip


def outline(uri: str, cache: Path, others: Sequence[str] = ()) -> Policy:
    """The policy of a checkpoint on the meta device; of its files only configurations and headers are read.

    Args:
        uri: as `fetch_checkpoint` takes it; or `published://NAME` for a published size of which no file is at hand.
        others: what the checkpoint lacks, as `load_policy` takes it.

    Raises:
        InputError: no such checkpoint or size; names or shapes that do not fit its configuration.
    """
    if uri.startswith(SCHEME):
        return _published(uri.removeprefix(SCHEME)).eval().to("meta")
    places = [fetch_checkpoint(other, cache) for other in others]
    return load_policy(fetch_checkpoint(uri, cache), others=places, weights=False)


def _published(name: str) -> Policy:
    words = make_word_tokenizer(["a"])
    if name in MARS:
        config = MarConfig.from_dict({"type": MARS[name]})
        return MarPolicy(on_meta(lambda: Mar(config)), Kl16(Kl16Config(), mar_bytes))
    if name in HARMONS:
        llm, mar = HARMONS[name]
        mar_keys: dict[str, Any] = {"type": mar, "img_size": 512}
        settings = HarmonConfig.from_dict({"llm": QWENS[llm], "mar": mar_keys})
        return HarmonPolicy(on_meta(lambda: Harmon(settings)), Kl16(Kl16Config(), harmon_bytes), words)
    if name == NOVA:
        scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
        return NovaPolicy.from_configs(_TRANSFORMER, _STABLE_DIFFUSION_VAE, _PHI_2, words, scheduler)
    hint = f"known are {', '.join(sorted([*MARS, *HARMONS, NOVA]))}"
    raise InputError("no published size has this name", where=SCHEME + name, hint=hint)
