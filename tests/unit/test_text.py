"""Prompts to features: padding, caching, the tokenizer, and configurations that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PhiConfig, PhiModel, PreTrainedTokenizerFast

from mar_grpo.errors import InputError
from mar_grpo.models import features
from mar_grpo.models.text import TextEncoder, make_word_tokenizer
from tests.unit import tiny

FC1 = "model.layers.0.mlp.fc1.weight"


def encoder(seed: int = 0, max_tokens: int = 8, **changes: Any) -> TextEncoder:
    generator = torch.Generator().manual_seed(seed)
    return TextEncoder.from_config(tiny.TEXT | changes, tiny.tokenizer(), max_tokens, generator)


def test_features_are_the_last_hidden_state_without_padding() -> None:
    text = encoder()
    long, empty, short = text.encode(["a photo of two apples", "", "a dog"])
    assert long.shape == (5, 16) and empty.shape == (0, 16) and short.shape == (2, 16)
    ids = torch.tensor([text.token_ids("a dog")])
    expected = text.model(input_ids=ids).last_hidden_state[0]
    torch.testing.assert_close(short, expected, rtol=0, atol=0)
    assert short.dtype == torch.float32 and not short.requires_grad


def test_a_prompt_does_not_depend_on_its_batch() -> None:
    alone = encoder().encode(["a dog"])[0]
    together = encoder().encode(["a photo of two red apples", "a dog"])[1]
    assert torch.equal(alone, together)
    batched = encoder().encode_trainable(["a photo of two red apples", "a dog", ""])
    torch.testing.assert_close(batched[1], alone, rtol=0, atol=1e-5)
    assert batched[2].shape == (0, 16)


def test_trainable_encoding_has_a_gradient() -> None:
    text = encoder()
    text.encode_trainable(["a dog", "a red circle"])[1].square().sum().backward()
    assert text.get_parameter("model.embed_tokens.weight").grad is not None
    gradient = text.get_parameter(FC1).grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_the_cache_forgets_when_weights_change() -> None:
    text = encoder()
    before = text.encode(["a dog"])[0]
    assert text.encode(["a dog"])[0] is before
    with torch.no_grad():
        text.get_parameter(FC1).mul_(2)
    assert not torch.allclose(text.encode(["a dog"])[0], before)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MEMORY_BYTES", 3 * 2 * 16 * 4)
    text = encoder()
    first = text.encode(["a dog"])[0]
    text.encode(["a circle", "a photo", "a apple"])
    again = text.encode(["a dog"])[0]
    assert again is not first and torch.equal(again, first)


def test_long_prompts_are_refused_by_check_and_cut_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    text = encoder(max_tokens=4)
    with pytest.raises(InputError, match=r"prompt has 5 tokens, at most 4 are read .*a photo of two apples") as caught:
        text.check("a photo of two apples")
    assert caught.value.exit_code == 2
    text.check("a photo of apples")
    assert text.encode(["a photo of two apples"])[0].shape == (4, 16)
    text.encode(["a photo of two red apples"])
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1


def test_word_tokenizer() -> None:
    tokenizer = make_word_tokenizer(["b", "A", "a", "t-shirt"])
    assert tokenizer.get_vocab() == {"<pad>": 0, "<unk>": 1, "-": 2, "a": 3, "b": 4, "shirt": 5, "t": 6}
    assert tokenizer.encode("B a T-shirt zebra").tokens == ["b", "a", "t", "-", "shirt", "<unk>"]


def test_padding_and_truncation_of_a_tokenizer_file_are_switched_off() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.enable_padding(direction="left", length=12)
    tokenizer.enable_truncation(2)
    text = TextEncoder.from_config(tiny.TEXT, tokenizer, 8, torch.Generator().manual_seed(0))
    assert len(text.token_ids("a photo of two apples")) == 5


def test_building_leaves_the_global_generator_alone_and_follows_the_seed() -> None:
    state = torch.get_rng_state()
    one, same, other = encoder(0), encoder(0), encoder(1)
    assert torch.equal(state, torch.get_rng_state())
    weights = [part.get_parameter(FC1) for part in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_transformers_reads_what_the_encoder_describes(tmp_path: Path) -> None:
    """Configuration, rotary tables included, and tokenizer mean the same to transformers' own loaders."""
    text = encoder(partial_rotary_factor=0.25)
    theirs = PhiModel(PhiConfig.from_dict(text.config)).eval()
    theirs.load_state_dict(text.model.state_dict())
    text.tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), unk_token="<unk>")
    ids = tokenizer(["a photo of two zebras"], return_tensors="pt").input_ids
    torch.testing.assert_close(theirs(input_ids=ids).last_hidden_state[0], text.encode(["a photo of two zebras"])[0])


def test_published_class_name_is_phi_and_its_code_is_not_asked_for() -> None:
    published: dict[str, Any] = {
        "architectures": ["PhiEncoderModel"],
        "auto_map": {"AutoModel": "evil.Model"},
        "_class_name": "PhiEncoderModel",
    }
    assert "auto_map" not in encoder(**published).config


def test_equal_prompts_have_equal_features_in_training_mode() -> None:
    text = encoder(resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5)
    expected = text.encode_trainable(["a dog"])[0]
    assert torch.equal(text.train().encode_trainable(["a dog"])[0], expected)


def test_full_size_phi() -> None:
    """Phi-2's published numbers: with its language head (left out here) 2,779,683,840 parameters."""
    published = {
        "architectures": ["PhiEncoderModel"],
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "vocab_size": 51200,
        "partial_rotary_factor": 0.4,
        "rope_theta": 10000.0,
        "resid_pdrop": 0.1,
        "torch_dtype": "float16",
    }
    text = TextEncoder.from_config(published, tiny.tokenizer(), 256)
    head = 51200 * 2560 + 51200
    assert sum(parameter.numel() for parameter in text.parameters()) == 2_779_683_840 - head
    assert text.get_buffer("model.rotary_emb.inv_freq").shape == (16,)  # 0.4 of 80 channels, in pairs
    assert text.dim == 2560


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "text encoder llama is not supported"),
        ({"architectures": ["T5EncoderModel"]}, "text encoder T5EncoderModel is not supported"),
        ({"hidden_size": 15}, "hidden_size 15 does not split into 2 heads"),
        ({"partial_rotary_factor": 0.4}, "heads of an even rotary width"),
        ({"hidden_size": "wide"}, "PhiModel refuses its configuration"),
        ({"vocab_size": 5}, r"the tokenizer has 16 ids, the text encoder 5 embeddings"),
    ],
)
def test_wrong_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        encoder(**changes)
    assert "text_encoder/config.json" in str(caught.value)
