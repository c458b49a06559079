"""Writing checkpoints in the layouts of their families; every tensor keeps its published name, shape and bytes.

    NOVA     the published folder (see `checkpoint`)
    Harmon   the published folder: config.json, model.safetensors (vae. llm. mar. proj_in. proj_out.), tokenizer.json;
             or, as a .pth file, the flat dict of tensors without `vae.`
    MAR      ours: config.json, model.safetensors (mar. vae.), classes.json where classes have names;
             published: checkpoint-last.pth ({"model", "model_ema"}, equal), kl16.ckpt, config.json for other sizes than
             the published; or the .pth file alone

What is ours beside the published files (config.json of MAR, its keys `vae` and `image_size`) disturbs no loader of
theirs. `llm.lm_head.weight` is tied to the embedding and left out.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from mar_grpo.errors import InputError, UnhealthyError
from mar_grpo.models.harmon import HarmonPolicy
from mar_grpo.models.kl16 import Kl16Config
from mar_grpo.models.layouts import finite
from mar_grpo.models.mar import MarPolicy
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.models.text import PAD, UNKNOWN
from mar_grpo.transports import PartFile, explain_local

NOVA = "NOVAPipeline"
DIFFUSERS_STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"
Layout = Literal["ours", "published"]


def save_policy(
    policy: Policy,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    layout: Layout = "ours",
) -> Path:
    """Write a policy; its folder or file appears complete or not at all, and replaces an older one.

    Args:
        path: a folder; or, for MAR and Harmon, a .pth file, which is in the published layout.
        dtype: storage of all weights (None: as they are); float16 halves the size of float32.

    Raises:
        UnhealthyError: a weight is not finite.
        InputError: a weight is out of range of `dtype`.
        RetryableError: the disk is full.
    """
    path = Path(path).absolute()
    tensors = {
        part: {name: _stored(f"{part}: {name}", value, dtype) for name, value in named.items()}
        for part, named in published_tensors(policy).items()
    }
    if path.suffix == ".pth":
        _save_torch(policy, tensors, path)
        return path
    with whole_folder(path, replace=True) as partial:
        if isinstance(policy, NovaPolicy):
            _save_nova(policy, tensors, partial)
        elif isinstance(policy, MarPolicy):
            _save_mar(policy, tensors, partial, layout)
        elif isinstance(policy, HarmonPolicy):
            _save_harmon(policy, tensors, partial)
    return path


def published_tensors(policy: Policy) -> dict[str, dict[str, Tensor]]:
    """Part -> name -> tensor, in the names and shapes of the family's published files."""
    if isinstance(policy, NovaPolicy):
        parts = {"transformer": policy.transformer, "vae": policy.vae.model, "text_encoder": policy.text.model}
        return {part: module.state_dict() for part, module in parts.items()}
    if isinstance(policy, MarPolicy):
        return {"mar": policy.transformer.state_dict(), "vae": policy.vae.published_state()}
    if isinstance(policy, HarmonPolicy):
        network = policy.transformer
        parts = {"llm": network.llm, "mar": network.mar, "proj_in": network.proj_in, "proj_out": network.proj_out}
        return {part: module.state_dict() for part, module in parts.items()} | {"vae": policy.vae.published_state()}
    raise TypeError(f"no published layout for {type(policy).__name__}")


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not finite(tensor):
        raise UnhealthyError(f"tensor {name} is not finite, the checkpoint is not written")
    stored = tensor.detach().to("cpu", dtype).contiguous()
    if stored.dtype != tensor.dtype and not finite(stored):
        raise InputError(f"tensor {name} is out of range of {dtype}", hint="store float32")
    return stored


Parts = Mapping[str, Mapping[str, Tensor]]


def configuration(policy: Policy) -> dict[str, Any]:
    """Part -> content of its configuration file (NOVA); content of config.json (MAR, Harmon)."""
    if isinstance(policy, NovaPolicy):
        return {
            "transformer": policy.transformer.config.to_dict(),
            "vae": policy.vae.config,
            "text_encoder": policy.text.config,
            "scheduler": policy.scheduler_config,
        }
    config: dict[str, Any] = policy.transformer.config.to_dict()
    if isinstance(policy, MarPolicy):
        config = {"model_type": "mar", "mar": config}
    vae = {} if policy.vae.settings == Kl16Config() else {"vae": policy.vae.config}
    return config | {"mar": _mar_keys(config["mar"])} | vae


def _save_nova(policy: NovaPolicy, parts: Parts, folder: Path) -> None:
    configs = configuration(policy)
    index = {
        "_class_name": NOVA,
        "scheduler": ["diffusers", configs["scheduler"].get("_class_name", "FlowMatchEulerDiscreteScheduler")],
        "text_encoder": ["transformers", "PhiModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["__transformer__", "NOVATransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    _write_json(folder / "model_index.json", index)
    _write_json(folder / "scheduler/scheduler_config.json", configs["scheduler"])
    _save_tokenizer(policy.text.tokenizer, folder / "tokenizer")
    for name, tensors in parts.items():
        _write_json(folder / name / "config.json", configs[name])
        stem = TRANSFORMERS_STEM if name == "text_encoder" else DIFFUSERS_STEM
        _save_safetensors(tensors, folder / name / f"{stem}.safetensors")


def _save_harmon(policy: HarmonPolicy, parts: Parts, folder: Path) -> None:
    _write_json(folder / "config.json", configuration(policy))
    _save_safetensors(_flat(parts), folder / "model.safetensors")
    _save_tokenizer(policy.text.tokenizer, folder)


def _save_mar(policy: MarPolicy, parts: Parts, folder: Path, layout: Layout) -> None:
    _write_json(folder / "config.json", configuration(policy))
    if policy.class_names:
        _write_json(folder / "classes.json", policy.class_names)
    if layout == "ours":
        _save_safetensors(_flat(parts), folder / "model.safetensors")
    else:
        _save_torch(policy, parts, folder / "checkpoint-last.pth")
        with PartFile(folder / "kl16.ckpt") as part:
            torch.save({"model": dict(parts["vae"])}, part.file)


def _save_torch(policy: Policy, parts: Parts, path: Path) -> None:
    """What the original training code resumes from (MAR) or loads non-strictly beside KL-16 (Harmon)."""
    if isinstance(policy, NovaPolicy):
        raise InputError("a NOVA checkpoint is a folder", where=str(path))
    if isinstance(policy, MarPolicy):
        content: dict[str, Any] = {"model": dict(parts["mar"]), "model_ema": dict(parts["mar"])}
    else:
        content = _flat({part: named for part, named in parts.items() if part != "vae"})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with PartFile(path) as part:
            torch.save(content, part.file)
    except OSError as error:
        raise explain_local("write", str(path), error) from error


def _flat(parts: Parts) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}


def _mar_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The keys the original factories take: a published `type` stands for the sizes of encoder and decoder."""
    sizes = ("encoder_", "decoder_", "mlp_ratio", "norm_eps") if "type" in config else ()
    return {key: value for key, value in config.items() if not key.startswith(sizes)}


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    vocabulary = tokenizer.get_vocab()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "right"}
    for key, token in (
        ("pad_token", PAD),
        ("pad_token", "<|endoftext|>"),  # of Qwen
        ("unk_token", UNKNOWN),
        ("eos_token", "<|im_end|>"),
    ):
        if token in vocabulary:
            config.setdefault(key, token)
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _save_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})
    shutil.copymode(path.with_name("config.json"), path)  # safetensors makes files only their owner can read


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def whole_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and vanishes when not.

    With `replace` False a folder that somebody else put there meanwhile stays.
    """
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    old = partial.with_name(partial.name + ".old")
    try:
        partial.mkdir(parents=True)
        yield partial
        if replace and folder.exists():
            folder.rename(old)
        try:
            partial.rename(folder)
        except OSError:
            if replace or not folder.is_dir():
                raise
    except OSError as error:
        raise explain_local("write", str(folder), error) from error
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise explain_local("write", str(folder), OSError(int(code[1]), os.strerror(int(code[1])))) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
