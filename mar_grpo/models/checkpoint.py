"""Checkpoints in the published NOVA folder layout: JSON and safetensors in, the same out, nothing executed.

    model_index.json
    transformer/{config.json, diffusion_pytorch_model.safetensors}
    vae/{config.json, diffusion_pytorch_model.safetensors}
    text_encoder/{config.json, model.safetensors}
    tokenizer/{tokenizer.json, tokenizer_config.json}
    scheduler/scheduler_config.json

Weights may be sharded (`*.safetensors.index.json`) and stored in 16 bits; they are float32 in memory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from mar_grpo.errors import InputError, RetryableError, UnhealthyError
from mar_grpo.models.policy import Policy
from mar_grpo.models.text import PAD, UNKNOWN

FAMILY = "NOVAPipeline"
DIFFUSERS_STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


# --- load --------------------------------------------------------------------------------------------------------


def load_policy(folder: str | os.PathLike[str]) -> Policy:
    """The policy of a published or saved folder, float32 on the CPU, in eval mode.

    Raises:
        InputError: a file is missing, cut or not what it should be; another family; a tensor is missing, unexpected, of
            another shape or not finite. The message names the file and the tensor.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError("checkpoint folder does not exist", where=str(folder))
    index = folder / "model_index.json"
    family = read_config(index).get("_class_name")
    if family != FAMILY:
        raise InputError(f"checkpoint family {family} is not supported, {FAMILY} is", where=f"{index}: _class_name")
    policy = Policy.from_configs(
        read_config(folder / "transformer/config.json"),
        read_config(folder / "vae/config.json"),
        read_config(folder / "text_encoder/config.json"),
        _read_tokenizer(folder / "tokenizer/tokenizer.json"),
        read_config(folder / "scheduler/scheduler_config.json"),
    )
    _load_weights(policy.transformer, folder / "transformer", DIFFUSERS_STEM)
    _load_weights(policy.vae.model, folder / "vae", DIFFUSERS_STEM, _current_vae_form)
    _load_weights(policy.text.model, folder / "text_encoder", TRANSFORMERS_STEM, _decoder_form)
    return policy.eval()


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InputError: no such file, not JSON, not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("checkpoint file is missing", where=str(path)) from None
    except (ValueError, OSError) as error:
        raise InputError(f"checkpoint file cannot be read: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise InputError("checkpoint file must hold a JSON object", where=str(path))
    return content


def read_tensors(folder: Path, stem: str) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, name, tensor) of STEM.safetensors, or of every shard that STEM.safetensors.index.json lists.

    Raises:
        InputError: a file is missing, cut or no safetensors; a shard lacks a tensor that the index promises.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.exists() or not index.exists():
        for name, tensor in _read_shard(single).items():
            yield single, name, tensor
        return
    places = read_config(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise InputError("index has no weight_map of tensor names to files", where=str(index))
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard:
            raise InputError(f"index names a file outside its folder: {shard}", where=str(index))
        tensors = _read_shard(folder / shard)
        for name in (name for name, place in places.items() if place == shard):
            if name not in tensors:
                raise InputError(f"tensor {name} is missing", where=str(folder / shard))
            yield folder / shard, name, tensors[name]


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError("checkpoint file is missing", where=str(path)) from None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        hint = "fetch the file again"
        raise InputError(f"weights are cut or damaged: {error}", where=str(path), hint=hint) from error


Form = Callable[[str, Tensor], tuple[str, Tensor] | None]


def _load_weights(module: nn.Module, folder: Path, stem: str, form: Form | None = None) -> None:
    """Give `module` the tensors of a folder; `form` turns a stored (name, tensor) into ours, None: it is not for us."""
    wanted = module.state_dict()
    found: dict[str, Tensor] = {}
    for path, stored, tensor in read_tensors(folder, stem):
        ours = form(stored, tensor) if form else (stored, tensor)
        if ours is None:
            continue
        name, tensor = ours
        if name not in wanted:
            raise InputError(f"unexpected tensor {stored}", where=str(path), hint="does config.json belong to it?")
        if tensor.shape != wanted[name].shape:
            what = f"tensor {stored} has shape {list(tensor.shape)}, config.json asks for {list(wanted[name].shape)}"
            raise InputError(what, where=str(path))
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise InputError(f"tensor {stored} holds values that are not finite numbers", where=str(path))
        found[name] = tensor.float()
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"tensor {missing[0]}{more} missing", where=str(folder))
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    module.load_state_dict(found, assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name])


def _decoder_form(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """PhiModel's form of a tensor stored with the language head (`model.` in front of names, `lm_head` beside)."""
    return None if name.startswith("lm_head.") else (name.removeprefix("model."), tensor)


def _current_vae_form(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Today's form of an attention projection: published Stable Diffusion files have other names, some 1x1 kernels."""
    found = re.fullmatch(r"(.*\.attentions\.\d+\.)(query|key|value|proj_attn)(\.weight|\.bias)", name)
    if not found:
        return name, tensor
    return found[1] + _OLD_ATTENTION[found[2]] + found[3], tensor.flatten(1) if tensor.ndim == 4 else tensor


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise InputError("checkpoint file is missing", where=str(path))
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"tokenizer cannot be read: {error}", where=str(path)) from error


# --- save --------------------------------------------------------------------------------------------------------


def save_policy(policy: Policy, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a policy in the published layout; the folder appears complete or not at all, and replaces an older one.

    Args:
        dtype: storage of all weights; float16 halves the size and is float32 again after loading.

    Raises:
        UnhealthyError: a weight is not finite.
        InputError: a weight is out of range of `dtype`.
        RetryableError: the disk is full.
    """
    folder = Path(folder).absolute()
    scheduler = policy.scheduler_config.get("_class_name", "FlowMatchEulerDiscreteScheduler")
    index = {
        "_class_name": FAMILY,
        "scheduler": ["diffusers", scheduler],
        "text_encoder": ["transformers", "PhiModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["__transformer__", "NOVATransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    special = {"pad_token": PAD, "unk_token": UNKNOWN}
    vocabulary = policy.text.tokenizer.get_vocab()
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"} | {
        key: token for key, token in special.items() if token in vocabulary
    }
    with _whole_folder(folder) as partial:
        _write_json(partial / "model_index.json", index)
        _write_json(partial / "scheduler/scheduler_config.json", policy.scheduler_config)
        _write_json(partial / "tokenizer/tokenizer_config.json", tokenizer_config)
        (partial / "tokenizer/tokenizer.json").write_text(policy.text.tokenizer.to_str(pretty=True), encoding="utf-8")
        for name, stem, module, config in (
            ("transformer", DIFFUSERS_STEM, policy.transformer, policy.transformer.config.to_dict()),
            ("vae", DIFFUSERS_STEM, policy.vae.model, policy.vae.config),
            ("text_encoder", TRANSFORMERS_STEM, policy.text.model, policy.text.config),
        ):
            _write_json(partial / name / "config.json", config)
            tensors = {key: _stored(f"{name}: {key}", value, dtype) for key, value in module.state_dict().items()}
            weights = partial / name / f"{stem}.safetensors"
            save_file(tensors, weights, metadata={"format": "pt"})
            shutil.copymode(partial / "model_index.json", weights)  # safetensors makes files only their owner can read
    return folder


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise UnhealthyError(f"tensor {name} is not finite, the checkpoint is not written")
    stored = tensor.detach().to("cpu", dtype).contiguous()
    if not torch.isfinite(stored).all():
        raise InputError(f"tensor {name} is out of range of {dtype}", hint="store float32")
    return stored


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and vanishes when not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            old = partial.with_name(partial.name + ".old")
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise RetryableError("no space left for the checkpoint", where=str(folder), hint="free space") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
