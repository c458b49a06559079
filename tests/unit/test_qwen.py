"""Qwen behind a prompt read once: the same as reading everything together; positions, padding, precision, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.errors import InputError
from mar_grpo.models.qwen import Qwen
from mar_grpo.models.text import ChatPrompts
from tests.unit import tiny

LLM: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])
GIVEN = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def qwen(**changes: Any) -> Qwen:
    return Qwen.from_config(LLM | changes, torch.Generator().manual_seed(0))


def rest(seed: int = 1) -> Tensor:
    return torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(seed))


def test_a_prompt_read_before_counts_as_if_read_together() -> None:
    from transformers import Qwen2Config, Qwen2Model

    model, x = qwen(), rest()
    whole = Qwen2Model(Qwen2Config.from_dict(LLM)).eval()
    whole.load_state_dict(model.model.state_dict())
    _, prompt = model.prefill(IDS, GIVEN)
    assert prompt.shape == (2, 5, 2 * 2 * 2 * 6 + 1) and not prompt.requires_grad
    after = model(x, prompt)
    for row, count in enumerate(GIVEN.sum(1)):
        together = torch.cat([whole.embed_tokens(IDS[row, :count]), x[row]])[None]
        expected = whole(inputs_embeds=together).last_hidden_state[0, count:]
        torch.testing.assert_close(after[row], expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model(x, prompt), after, rtol=0, atol=0)  # nothing was kept


def test_padding_never_counts() -> None:
    model, x = qwen(), rest()
    _, prompt = model.prefill(IDS, GIVEN)
    spoilt = prompt.clone()
    spoilt[1, 3:, :-1] = 100.0
    torch.testing.assert_close(model(x, spoilt), model(x, prompt), rtol=0, atol=0)
    torch.testing.assert_close(model(x[1:], prompt[1:, :3]), model(x, prompt)[1:], rtol=0, atol=1e-6)


def test_gradient_passes_through_but_stays_out_of_the_model() -> None:
    model, x = qwen().requires_grad_(False), rest().requires_grad_(True)
    model(x, model.prefill(IDS, GIVEN)[1]).square().sum().backward()
    assert x.grad is not None and bool((x.grad.abs().sum(-1) > 0).all())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_positions_are_exact_in_16_bits() -> None:
    cos, sin = qwen().to(torch.bfloat16)._rotation(torch.tensor([999]), 2, 1000, torch.float32)
    expected = qwen()._rotation(torch.tensor([999]), 2, 1000, torch.float32)
    assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])
    assert qwen().to(torch.bfloat16).prefill(IDS)[1].dtype == torch.bfloat16


def test_a_tied_language_head_is_passed_over() -> None:
    model = qwen()
    weights = model.state_dict()
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict(weights | {"other.weight": weights["model.embed_tokens.weight"]})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "llama"}, "language model llama is not supported"),
        ({"use_sliding_window": True}, "sliding windows are not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling"),
        ({"hidden_size": "wide"}, "Qwen2Model refuses its configuration"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        qwen(**changes)
    assert caught.value.exit_code == 2


def test_chat_prompts() -> None:
    prompts = ChatPrompts(qwen(), tiny.tokenizer(), max_tokens=60)
    dog, empty = prompts.encode(["a dog", None])
    assert len(dog) == len(prompts.token_ids("a dog")) > len(empty)
    assert prompts.encode(["a dog"])[0] is dog
    with pytest.raises(InputError, match=r"at most 3 are read .*'a dog'.*shorten"):
        ChatPrompts(qwen(), tiny.tokenizer(), max_tokens=3).check("a dog")
    with pytest.raises(InputError, match="ids"):
        ChatPrompts(qwen(vocab_size=4), tiny.tokenizer(), max_tokens=60)
