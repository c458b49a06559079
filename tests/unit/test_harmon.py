"""Harmon as a policy: what an image and an update depend on, what is trained, other sizes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.algorithms.loss import AlgorithmConfig, backward, kept, record, scales
from mar_grpo.errors import InputError
from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.vae import Vae
from mar_grpo.rollout import Guided, SamplingConfig, generate, roll_out
from tests.unit import tiny

LLM: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CONFIG: dict[str, Any] = {"model_type": "harmon", "llm": LLM, "mar": tiny.MAR}
PROMPTS = ["a photo of two red apples", "a dog", "a red circle and a dog"]
KEYS = [11, 12, 2**62 + 1]
SAMPLING = SamplingConfig(ar_steps=5, diffusion_steps="ddim5", guidance_scale=3.0)


def make(seed: int = 0, vae: dict[str, Any] | None = None, **changes: Any) -> HarmonPolicy:
    """A policy ready for training; layers that training starts at zero are filled, so the head speaks."""
    generator = torch.Generator().manual_seed(seed)
    network = Harmon(HarmonConfig.from_dict(CONFIG | changes), generator)
    for parameter in network.parameters():
        if not parameter.any():
            parameter.data.normal_(0.0, 0.3, generator=generator)
    policy = HarmonPolicy(network, Vae.from_config(tiny.VAE | (vae or {}), generator), tiny.tokenizer())
    policy.eval().requires_grad_(False)
    for parameter in policy.trunk_parameters():
        parameter.requires_grad_(True)
    return policy


@pytest.fixture(scope="module")
def policy() -> HarmonPolicy:
    return make()


def rolled(policy: HarmonPolicy, rows: slice = slice(None)) -> Tensor:
    return roll_out(Guided.of(policy, policy.encode_prompts(PROMPTS[rows]), SAMPLING), KEYS[rows]).tokens


def test_an_image_depends_on_its_prompt_and_key_only(policy: HarmonPolicy) -> None:
    together = rolled(policy)
    alone = torch.cat([rolled(policy, slice(row, row + 1)) for row in range(3)])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-4 * together.abs().max().item())
    images = policy.decode(together).int()
    assert (policy.decode(alone).int() - images).abs().max() <= 1
    parts = generate(policy, PROMPTS, KEYS, SAMPLING.model_copy(update={"batch_size": 2})).int()
    assert parts.shape == (3, 16, 16, 3) and (parts - images).abs().max() <= 1
    other = generate(policy, [PROMPTS[1], *PROMPTS[1:]], KEYS, SAMPLING).int()
    assert (other[0] - images[0]).abs().max() > 1 and (other[1:] - images[1:]).abs().max() <= 1


def test_each_prompt_is_read_once(policy: HarmonPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = policy.transformer.llm.prefill
    monkeypatch.setattr(policy.transformer.llm, "prefill", lambda ids: (read.append(len(ids)), prefill(ids))[1])
    prompts = ["apples above a dog", "a dog below apples"]
    generate(policy, prompts * 2, [1, 2, 3, 4], SAMPLING.model_copy(update={"batch_size": 3}))
    assert len(read) <= 3  # two prompts, and the one that stands for none


def test_an_update_reaches_mar_and_nothing_else() -> None:
    policy = make()
    reference, frozen = policy.frozen_copy(), {name: value.clone() for name, value in policy.state_dict().items()}
    assert reference.transformer.llm is policy.transformer.llm and reference.vae is policy.vae
    assert reference.transformer.mar is not policy.transformer.mar
    conditioning, index = policy.encode_prompts(PROMPTS[:2]), torch.tensor([0, 0, 1])
    config, steps = AlgorithmConfig.model_validate({"trajectories": {"mode": "off"}}), dict.fromkeys(range(5), range(4))
    batch = record(Guided.of(policy, conditioning, SAMPLING).rows(index), index, KEYS, steps, config)
    live, anchor = (Guided.of(each, conditioning, SAMPLING) for each in (policy, reference))
    advantage = torch.tensor([1.0, -1.0, 0.5])
    counts = policy.mask_schedule(5)
    weights = scales(config, steps, kept([batch], steps), counts=counts, images=3, token_dim=4)
    parts = backward(live, anchor, batch, advantage, steps, weights, config)  # checks z
    scored = sum(sum(counts[i:]) for i in range(5)) * 3 * 4 * 4
    assert parts.means()["kl"] == 0.0 and parts.numbers()["kl_elements"] == scored
    trained = {id(parameter) for parameter in policy.trunk_parameters()}
    for name, parameter in policy.named_parameters():
        reached = parameter.grad is not None and bool(parameter.grad.any())
        assert reached == (id(parameter) in trained), name
    trunk = [name for name, parameter in policy.named_parameters() if id(parameter) in trained]
    assert "transformer.mar.fake_latent" in trunk and "transformer.mar.class_emb.weight" not in trunk
    assert not [name for name in trunk if "diffloss" in name or ".mar." not in name]
    assert all(torch.equal(value, frozen[name]) for name, value in policy.state_dict().items())


def test_the_prompt_reaches_the_image_only_through_the_language_model(policy: HarmonPolicy) -> None:
    tokens, known = torch.zeros(1, 16, 4), torch.zeros(1, 16, dtype=torch.bool)
    one, two = (policy.ar_latents(tokens, known, policy.encode_prompts([prompt]).text) for prompt in PROMPTS[:2])
    assert (one - two).abs().max() > 1e-4
    some = policy.ar_latents(tokens, known, policy.encode_prompts(PROMPTS[:1]).text, wanted=torch.tensor([[3, 7]]))
    torch.testing.assert_close(some, one[:, [3, 7]], rtol=1e-5, atol=1e-5)


def test_a_larger_image_than_the_tables_were_trained_on() -> None:
    policy = make(image_size=[24, 16])
    assert policy.num_tokens == 24 and policy.transformer.mar.encoder_pos_embed_learned.shape[1] == 3 + 16
    images = generate(policy, PROMPTS[:1], KEYS[:1], SAMPLING)
    assert images.shape == (1, 24, 16, 3)
    assert policy.encode_images(images).shape == (1, 24, 4)
    with pytest.raises(InputError, match=r"images are \(16, 16\) px, the model makes \(24, 16\) px"):
        policy.encode_images(images[:, :16])


def test_16_bit_weights_give_float32_predictions() -> None:
    policy = make().to(torch.bfloat16)
    cond = policy.condition(policy.encode_prompts(PROMPTS))
    z = policy.ar_latents(torch.zeros(3, 16, 4), torch.zeros(3, 16, dtype=torch.bool), cond)
    assert cond.dtype == z.dtype == torch.bfloat16
    assert policy.head(torch.zeros(3, 16, 4), torch.tensor(500), z).dtype == torch.float32
    assert generate(policy, PROMPTS[:1], KEYS[:1], SAMPLING).shape == (1, 16, 16, 3)


def test_configuration_round_trip() -> None:
    published = CONFIG | {"torch_dtype": "float32", "auto_map": {"AutoModel": "modeling.Model"}, "image_size": [32, 16]}
    config = HarmonConfig.from_dict(published)
    assert config.grid == (8, 4) and config.mar.grid == (4, 4)
    assert HarmonConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "show-o"}, "model_type is 'show-o', not 'harmon'"),
        ({"llm": None}, "llm must be an object"),
        ({"mask": 1}, "unknown key 'mask'"),
        ({"mar": tiny.MAR | {"mask": 1}}, "unknown key 'mask'"),
        ({"image_size": 16}, "image_size must be height and width in px"),
        ({"image_size": [16, 18]}, "is no multiple of 4 px a token"),
        ({"mar": tiny.MAR | {"vae_stride": 8}}, "vae_stride against pixels per latent, 8 != 4"),
        ({"vae": {"latent_channels": 2}}, "vae_embed_dim against the autoencoder's channels, 4 != 2"),
        ({"llm": LLM | {"vocab_size": 4}}, "the tokenizer has"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        make(**changes)
    assert words in str(caught.value) and caught.value.exit_code == 2


def test_a_prompt_longer_than_the_language_model_reads() -> None:
    policy = make(llm=LLM | {"max_position_embeddings": 19 + 30})
    assert policy.text.max_tokens == 30
    with pytest.raises(InputError, match=r"prompt has \d+ tokens, at most 30 are read"):
        policy.encode_prompts(["a dog " * 20])
