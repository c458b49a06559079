"""What is known of the published MAR and Harmon models, for files that come without a config.json.

Sizes follow from the tensors' shapes; heads and everything else that shapes do not tell from the model that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mar_grpo.errors import InputError
from mar_grpo.models.build import on_meta
from mar_grpo.models.mar import SIZES, Mar, MarConfig
from mar_grpo.models.qwen import Qwen

_QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWENS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B-Instruct": _QWEN
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "Qwen2.5-1.5B-Instruct": _QWEN
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
# What releases of transformers before 5 wrote into a config.json beside today's keys and those of generation.
_OLD_KEYS = """
    add_cross_attention attn_implementation auto_map cross_attention_hidden_size finetuning_task is_decoder
    partial_rotary_factor prefix pruned_heads rope_scaling rope_theta sep_token_id task_specific_params tf_legacy_loss
    tie_encoder_decoder tokenizer_class torch_dtype torchscript use_bfloat16
""".split()  # noqa: SIM905
MARS: dict[str, dict[str, Any]] = {name: {"type": name} for name in SIZES}


def mar_of(shapes: Mapping[str, torch.Size], *, where: str) -> dict[str, Any]:
    """Configuration of the published MAR that tensors of these names and shapes belong to.

    Raises:
        InputError: fewer than half of any model's tensors are there in its shape.
    """
    return MARS[_fitting(MARS, lambda config: Mar(MarConfig.from_dict(config)), shapes, where)]


def qwen_of(shapes: Mapping[str, torch.Size], *, where: str) -> dict[str, Any]:
    """As `mar_of`, of Harmon's language model."""
    return QWENS[_fitting(QWENS, Qwen.from_config, shapes, where)]


def _fitting(
    known: Mapping[str, dict[str, Any]],
    make: Callable[[dict[str, Any]], nn.Module],
    shapes: Mapping[str, torch.Size],
    where: str,
) -> str:
    """Name of the configuration most of whose tensors are there; one wrong tensor is then told from all others."""
    best, share = "", 0.5
    for name, config in known.items():
        wanted = on_meta(lambda config=config: make(config)).state_dict()  # type: ignore[misc]
        fits = sum(shapes.get(key) == tensor.shape for key, tensor in wanted.items()) / len(wanted)
        if fits > share:
            best, share = name, fits
    if not best:
        what = f"the sizes are none of the published {', '.join(known)}"
        raise InputError(what, where=where, hint="put the model's config.json beside it")
    return best


def refuse_unknown(config: Mapping[str, Any], kind: str, *, where: str) -> None:
    """Refuse keys of a text model's config.json that transformers, which would pass over them, never wrote.

    Args:
        kind: model_type, "phi" or "qwen2".

    Raises:
        InputError: names the first such key.
    """
    from transformers import AutoConfig, GenerationConfig  # seconds

    known = {*AutoConfig.for_model(kind).to_dict(), *GenerationConfig().to_dict(), *_OLD_KEYS}
    unknown = sorted(key for key in config.keys() - known if not key.startswith("_"))
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}", where=where)
