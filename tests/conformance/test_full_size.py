"""Names and shapes of every published full-size model, on the meta device, against the recorded listing."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mar_grpo.errors import InputError
from mar_grpo.models.build import on_meta
from mar_grpo.models.harmon import Harmon, HarmonConfig
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.mar import Mar, MarConfig
from mar_grpo.models.published import QWENS, mar_of, qwen_of
from mar_grpo.models.vae import harmon_bytes

LISTING = json.loads((Path(__file__).parents[1] / "golden/full_size_layouts.json").read_text())
HARMON_MARS = {"harmon_0_5b": "mar_base", "harmon_1_5b": "mar_huge"}


def collapsed(shapes: dict[str, torch.Size]) -> dict[str, dict[str, Any]]:
    """The listing's form: the index of a transformer or head layer is `*`, with a count."""
    found: dict[str, Counter[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        starred = re.sub(r"((?:encoder|decoder|res)_blocks|llm\.model\.layers)\.\d+\.", r"\1.*.", name)
        found.setdefault(starred, Counter())[tuple(shape)] += 1
    assert all(len(counter) == 1 for counter in found.values())
    return {
        name: {"shape": list(shape), "count": count} for name, each in found.items() for shape, count in each.items()
    }


def shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def kl16_shapes(prefix: str) -> dict[str, torch.Size]:
    state = Kl16(Kl16Config(), harmon_bytes).published_state()
    return {prefix + name: tensor.shape for name, tensor in state.items()}


def harmon(name: str) -> Harmon:
    llm = {key: value for key, value in LISTING[name]["llm"].items() if key != "attn_implementation"}
    config = HarmonConfig.from_dict({"llm": llm, "mar": {"type": HARMON_MARS[name]}})
    return on_meta(lambda: Harmon(config))


@pytest.mark.parametrize("name", ["mar_base", "mar_large", "mar_huge"])
def test_mar(name: str) -> None:
    model = on_meta(lambda: Mar(MarConfig.from_dict({"type": name})))
    assert collapsed(shapes(model)) == LISTING[name]["tensors"]
    assert sum(value.numel() for value in model.parameters()) == LISTING[name]["params"]
    assert sum(value.numel() for value in model.head_parameters()) == LISTING[name]["head_params"]
    assert mar_of(shapes(model), where="file") == {"type": name}


def test_a_model_is_known_in_spite_of_one_wrong_tensor() -> None:
    found = shapes(on_meta(lambda: Mar(MarConfig.from_dict({"type": "mar_base"}))))
    assert mar_of(found | {"z_proj.weight": torch.Size([7, 16])}, where="file") == {"type": "mar_base"}
    with pytest.raises(InputError, match=r"none of the published mar_base, mar_large, mar_huge \(file\)"):
        mar_of({name: shape for name, shape in found.items() if "encoder" in name}, where="file")
    kl16 = kl16_shapes("")
    assert Kl16Config.from_shapes(kl16 | {"encoder.conv_in.weight": torch.Size([7])}, where="file") == Kl16Config()


def test_kl16() -> None:
    assert collapsed(kl16_shapes("")) == LISTING["kl16"]["tensors"]


@pytest.mark.parametrize("name", HARMON_MARS)
def test_harmon(name: str) -> None:
    model, listed = harmon(name), LISTING[name]
    embedding = listed["tensors"]["llm.model.embed_tokens.weight"]
    tied = {"llm.lm_head.weight": embedding}  # accepted and left out: the same numbers as the embedding
    assert collapsed(shapes(model) | kl16_shapes("vae.")) | tied == listed["tensors"]
    counts = {
        part: sum(value.numel() for value in getattr(model, part).parameters())
        for part in ("llm", "mar", "proj_in", "proj_out")
    }
    assert counts | {"vae": LISTING["kl16"]["params"]} == listed["parts"]
    assert sum(listed["parts"].values()) == listed["params_unique"]
    found = qwen_of(shapes(model.llm), where="file")
    assert found in QWENS.values() and found["hidden_size"] == listed["llm"]["hidden_size"]
    assert {key: found[key] for key in listed["llm"] if key in found} == {
        key: value for key, value in listed["llm"].items() if key in found
    }
    assert mar_of(shapes(model.mar), where="file") == {"type": HARMON_MARS[name]}
