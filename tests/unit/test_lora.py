"""Adapters: nothing at first, trained alone, merged into what is published; the reference without them is free."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mar_grpo.errors import InputError
from mar_grpo.models.export import published_tensors
from mar_grpo.models.policy import Policy
from mar_grpo.training.lora import LoraConfig, add_adapters, merge_adapters, without_adapters
from tests.unit import tiny_mar, toy
from tests.unit.toy_run import speaking

POLICIES: dict[str, tuple[Callable[[], Policy], list[str]]] = {
    "nova": (toy.policy, ["a dog", "two red apples"]),
    "mar": (lambda: speaking(tiny_mar.mar()), ["1", "3"]),
    "harmon": (lambda: speaking(tiny_mar.harmon()), ["a dog", "a red apple"]),
}


@pytest.fixture(params=POLICIES)
def start(request: pytest.FixtureRequest) -> tuple[Policy, list[str]]:
    make, prompts = POLICIES[request.param]
    return make().requires_grad_(False), prompts


def outputs(policy: Policy, prompts: list[str]) -> list[Tensor]:
    """z of some and of all tokens, and the head's predictions."""
    tokens = torch.randn(len(prompts), policy.num_tokens, policy.token_dim, generator=torch.Generator().manual_seed(5))
    known = torch.zeros(tokens.shape[:2], dtype=torch.bool)
    known[:, [1, 4, 6]] = True
    cond = policy.condition(policy.encode_prompts(prompts))
    wanted = torch.tensor([[0, 3, 5]]).expand(len(prompts), -1)
    z = policy.ar_latents(tokens, known, cond)
    return [z, policy.ar_latents(tokens, known, cond, wanted=wanted), policy.head(tokens, torch.tensor(300), z)]


def fill(parameters: dict[str, torch.nn.Parameter]) -> None:
    """As after training: B is not zero any more."""
    generator = torch.Generator().manual_seed(7)
    for name, value in parameters.items():
        if ".lora_B." in name:
            value.data.normal_(0.0, 0.1, generator=generator)


def test_adapters_change_nothing_at_first_and_what_they_learn_is_merged(start: tuple[Policy, list[str]]) -> None:
    policy, prompts = start
    before, plain = outputs(policy, prompts), {part: dict(own) for part, own in published_tensors(policy).items()}
    parameters = add_adapters(policy, "both", LoraConfig(rank=3), seed=0)
    assert all(torch.equal(one, other) for one, other in zip(outputs(policy, prompts), before, strict=True))
    fill(parameters)
    adapted = outputs(policy, prompts)
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(adapted, before, strict=True))
    merge_adapters(policy)
    for one, other in zip(outputs(policy, prompts), adapted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    merged = published_tensors(policy)
    assert {part: list(own) for part, own in merged.items()} == {part: list(own) for part, own in plain.items()}
    assert all(own[name].shape == plain[part][name].shape for part, own in merged.items() for name in own)
    assert not any("lora" in name or "base_layer" in name for name, _ in policy.named_parameters())


@pytest.mark.parametrize("part", ["trunk", "head", "both"])
def test_only_adapters_are_trained_and_all_of_them(start: tuple[Policy, list[str]], part: str) -> None:
    policy, prompts = start
    plain = dict(policy.transformer.named_parameters())
    head = {
        name.removesuffix(".weight") for name, p in plain.items() if any(p is own for own in policy.head_parameters())
    }
    parameters = add_adapters(policy, part, LoraConfig(rank=2), seed=0)  # type: ignore[arg-type]
    fill(parameters)
    torch.stack([value.square().sum() for value in outputs(policy, prompts)]).sum().backward()
    trained = {name for name, value in policy.named_parameters() if value.requires_grad}
    assert trained == {f"transformer.{name}" for name in parameters}
    assert all(value.grad is not None and value.grad.any() for value in parameters.values())
    of_head = {name for name in parameters if name.split(".lora_")[0] in head}
    assert (part != "trunk") == bool(of_head) and (part != "head") == bool(parameters.keys() - of_head)
    if part != "head" and hasattr(policy, "text") and not hasattr(policy.transformer, "llm"):
        assert any(name.startswith("video_encoder.") for name in parameters)
    assert not any(name.startswith(("llm.", "proj_")) for name in parameters)


def test_the_policy_without_its_adapters_is_the_start(start: tuple[Policy, list[str]]) -> None:
    policy, prompts = start
    before = outputs(policy, prompts)
    reference = without_adapters(policy)
    fill(add_adapters(policy, "both", LoraConfig(), seed=0))
    assert all(torch.equal(one, other) for one, other in zip(outputs(reference, prompts), before, strict=True))
    own = {value.data_ptr() for value in policy.parameters()}
    assert all(value.data_ptr() in own for value in reference.parameters())


def test_adapters_are_drawn_from_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, same, other = (add_adapters(toy.policy(), "trunk", LoraConfig(), seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, same[name]) for name, value in first.items())
    assert any(not torch.equal(value, other[name]) for name, value in first.items())


def test_targets_are_names_or_their_ends() -> None:
    def layers(*targets: str, part: str = "trunk") -> set[str]:
        parameters = add_adapters(toy.policy(), part, LoraConfig(targets=targets), seed=0)  # type: ignore[arg-type]
        return {name.split(".lora_")[0] for name in parameters}

    assert layers("video_encoder.blocks.0.attn.qkv") == {"video_encoder.blocks.0.attn.qkv"}
    assert layers("attn.qkv", "text_embed.proj") == {
        *(f"video_encoder.blocks.{i}.attn.qkv" for i in range(2)),
        *(f"image_encoder.blocks.{i}.attn.qkv" for i in range(4)),
        "text_embed.proj",
    }
    with pytest.raises(InputError, match=r"no linear layer of the trained part is named 'q_proj' .*names end in.*qkv"):
        layers("qkv", "q_proj")
    with pytest.raises(InputError, match="is named 'qkv'"):
        layers("qkv", part="head")
    with pytest.raises(InputError, match="no linear layer"):
        add_adapters(tiny_mar.mar(), "condition", LoraConfig(), seed=0)
