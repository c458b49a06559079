"""Checkpoints of the three families: JSON and tensors in, a policy out, nothing executed.

NOVA is a folder as published:

    model_index.json
    transformer/{config.json, diffusion_pytorch_model.safetensors}
    vae/{config.json, diffusion_pytorch_model.safetensors}
    text_encoder/{config.json, model.safetensors}
    tokenizer/{tokenizer.json, tokenizer_config.json}
    scheduler/scheduler_config.json

MAR and Harmon are found in several layouts (`layouts`). Weights may be sharded and stored in 16 bits. They are mapped
from their files into modules that were built on the meta device: there is no second copy. So the files must not be
written to while the policy lives; `save_policy` puts new files in their place, which is safe.

Saving is in `export`, stores and digests in `checkpoint_store`; their public names are here as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from mar_grpo.errors import InputError
from mar_grpo.models.build import on_meta
from mar_grpo.models.checkpoint_store import fetch_checkpoint, folder_digest, publish_checkpoint
from mar_grpo.models.export import DIFFUSERS_STEM, NOVA, TRANSFORMERS_STEM, save_policy
from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.layouts import Contents, Stored, finite, open_contents, read_config, read_stem
from mar_grpo.models.mar import Mar, MarConfig, MarPolicy
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.models.published import mar_of, qwen_of, refuse_unknown
from mar_grpo.models.vae import harmon_bytes, mar_bytes

__all__ = ["fetch_checkpoint", "folder_digest", "load_policy", "publish_checkpoint", "save_policy"]

Read = Callable[[Stored], Tensor] | None  # None: only names and shapes matter
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def load_policy(
    path: str | os.PathLike[str],
    *,
    others: Sequence[str | os.PathLike[str]] = (),
    dtype: torch.dtype | None = torch.float32,
    weights: bool = True,
) -> Policy:
    """The policy of a folder or weights file, on the CPU, in eval mode.

    Args:
        path: a local folder or file (`fetch_checkpoint` brings it from a store).
        others: places of what it lacks: kl16.ckpt or kl16.safetensors, tokenizer.json, the Harmon model around a bare
            MAR.
        dtype: of the weights in memory; None: as they are stored. Conversion costs the memory of the converted model.
        weights: False checks names and shapes only, reads no value, and gives a policy on the meta device.

    Raises:
        InputError: a file is missing, cut or not what it should be; another family; a configuration has an unknown key;
            a tensor is missing, unexpected, of another shape or not finite. The message names file and tensor.
    """
    path, read = Path(path), (lambda stored: stored.read(dtype)) if weights else None
    if (path / "model_index.json").exists() or (path / "transformer").is_dir():
        policy: Policy = _load_nova(path, read)
    else:
        contents = open_contents(path, [Path(other) for other in others])
        policy = (_load_harmon if contents.family == "harmon" else _load_mar)(contents, path, read)
    return policy.eval() if weights else policy.eval().to("meta")


def _load_nova(folder: Path, read: Read) -> NovaPolicy:
    index = folder / "model_index.json"
    family = read_config(index).get("_class_name")
    if family != NOVA:
        raise InputError(f"checkpoint family {family} is not supported, {NOVA} is", where=f"{index}: _class_name")
    text = read_config(folder / "text_encoder/config.json")
    policy = NovaPolicy.from_configs(
        read_config(folder / "transformer/config.json"),
        read_config(folder / "vae/config.json"),
        text,
        _read_tokenizer(folder / "tokenizer/tokenizer.json"),
        read_config(folder / "scheduler/scheduler_config.json"),
    )
    refuse_unknown(text, "phi", where=str(folder / "text_encoder/config.json"))
    for module, name, stem, form in (
        (policy.transformer, "transformer", DIFFUSERS_STEM, dict),
        (policy.vae.model, "vae", DIFFUSERS_STEM, _current_vae_form),
        (policy.text.model, "text_encoder", TRANSFORMERS_STEM, _decoder_form),
    ):
        _fill(module, form((each.name, each) for each in read_stem(folder / name, stem)), read, folder / name)
    network = policy.transformer
    for table in ("image_pos", "video_pos"):  # not stored
        network.register_buffer(table, network.get_buffer(table).to(network.text_embed.weight.dtype), persistent=False)
    return policy


def _load_mar(contents: Contents, path: Path, read: Read) -> MarPolicy:
    config = _mar_config(contents, path)
    network = on_meta(lambda: Mar(config))
    _fill(network, contents.part("mar"), read, path)
    names = read_config(contents.classes) if contents.classes else {}
    wrong = [name for name, number in names.items() if type(number) is not int]
    if wrong:
        raise InputError(f"class {wrong[0]!r} has no number", where=str(contents.classes))
    return MarPolicy(network, _load_kl16(contents, path, read, mar_bytes), names)


def _load_harmon(contents: Contents, path: Path, read: Read) -> HarmonPolicy:
    config = {key: value for key, value in contents.config.items() if key != "vae"}
    if "llm" not in config:
        config["llm"] = qwen_of(_shapes(contents.part("llm")), where=str(path))
    config.setdefault("mar", _mar_config(contents, path).to_dict())
    settings = HarmonConfig.from_dict(config)
    network = on_meta(lambda: Harmon(settings))
    refuse_unknown(settings.llm, "qwen2", where=f"{path}: config.json: llm")
    tensors = {name: stored for name, stored in contents.tensors.items() if not name.startswith("vae.")}
    head, embedding = tensors.pop("llm.lm_head.weight", None), tensors.get("llm.model.embed_tokens.weight")
    if read and head and embedding and not torch.equal(head.tensor, embedding.tensor):
        raise InputError(f"tensor {head.name} is not tied to the embedding", where=str(head.file))
    _fill(network, tensors, read, path)
    if contents.tokenizer is None:
        hint = "put tokenizer.json of the language model beside it, or name its place"
        raise InputError("Harmon's tokenizer.json is missing", where=str(path), hint=hint)
    vae = _load_kl16(contents, path, read, harmon_bytes)
    return HarmonPolicy(network, vae, _read_tokenizer(contents.tokenizer))


def _mar_config(contents: Contents, path: Path) -> MarConfig:
    config = contents.config.get("mar") or mar_of(_shapes(contents.part("mar")), where=str(path))
    return MarConfig.from_dict(config)


def _load_kl16(contents: Contents, path: Path, read: Read, to_bytes: Callable[[Tensor], Tensor]) -> Kl16:
    tensors = contents.part("vae")
    if not tensors:
        hint = "put kl16.ckpt or kl16.safetensors beside it, or name its place"
        raise InputError("the autoencoder's weights are missing", where=str(path), hint=hint)
    if "vae" in contents.config:
        settings = Kl16Config.from_dict(contents.config["vae"])
    else:
        settings = Kl16Config.from_shapes(_shapes(tensors), where=str(path))
    vae = Kl16(settings, to_bytes)
    names = vae.published_names()
    ours = {theirs: name for name, theirs in names.items()}
    shapes, wanted = vae.model.state_dict(), vae.published_state()
    found = {}
    for name, stored in tensors.items():
        if name in wanted and stored.tensor.shape == wanted[name].shape:
            stored = replace(stored, tensor=stored.tensor.view(shapes[ours[name]].shape))
        found[ours.get(name, name)] = stored
    _fill(vae.model, found, read, path, names)
    return vae


def _fill(
    module: nn.Module,
    tensors: Mapping[str, Stored],
    read: Read,
    where: Path,
    published: Mapping[str, str] | None = None,
) -> None:
    """Give `module` its tensors; it keeps which are trained. `published`: names for messages, where not its own."""
    wanted = module.state_dict()
    found: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        file = str(stored.file)
        if name not in wanted:
            raise InputError(f"unexpected tensor {stored.name}", where=file, hint="does config.json belong to it?")
        if stored.tensor.shape != wanted[name].shape:
            shape = list(stored.tensor.shape)
            what = f"tensor {stored.name} has shape {shape}, config.json asks for {list(wanted[name].shape)}"
            raise InputError(what, where=file)
        found[name] = read(stored) if read else stored.tensor
        if read and not (stored.tensor.is_floating_point() and finite(found[name])):
            raise InputError(f"tensor {stored.name} holds values that are not finite numbers", where=file)
    missing = [(published or {}).get(name, name) for name in wanted if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"tensor {missing[0]}{more} missing", where=str(where))
    if not read:
        return
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    module.load_state_dict(found, assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name])


def _shapes(tensors: Mapping[str, Stored]) -> dict[str, torch.Size]:
    return {name: stored.tensor.shape for name, stored in tensors.items()}


def _decoder_form(tensors: Iterable[tuple[str, Stored]]) -> dict[str, Stored]:
    """PhiModel's names of tensors stored with the language head (`model.` in front of names, `lm_head` beside)."""
    return {name.removeprefix("model."): stored for name, stored in tensors if not name.startswith("lm_head.")}


def _current_vae_form(tensors: Iterable[tuple[str, Stored]]) -> dict[str, Stored]:
    """Today's form of attention projections: published Stable Diffusion files have other names, some 1x1 kernels."""
    found = {}
    for name, stored in tensors:
        old = re.fullmatch(r"(.*\.attentions\.\d+\.)(query|key|value|proj_attn)(\.weight|\.bias)", name)
        if old:
            name = old[1] + _OLD_ATTENTION[old[2]] + old[3]
            if stored.tensor.ndim == 4:
                stored = replace(stored, tensor=stored.tensor.flatten(1))
        found[name] = stored
    return found


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise InputError("checkpoint file is missing", where=str(path))
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"tokenizer cannot be read: {error}", where=str(path)) from error
