"""The interface of a policy: its parts fit, prompts condition it, and both kinds of scheduler are understood."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mar_grpo.diffusion.ddpm import DdpmSchedule
from mar_grpo.diffusion.flow import FlowSchedule
from mar_grpo.errors import InputError
from tests.unit import tiny


def test_shapes_from_prompt_to_picture() -> None:
    policy = tiny.policy()
    cond = policy.condition(policy.encode_prompts(["a dog", "two red apples"]))
    known = torch.zeros(2, 16, dtype=torch.bool)
    known[0, 3] = known[1, 7] = True
    tokens = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    z = policy.ar_latents(tokens, known, cond)
    assert (policy.num_tokens, policy.token_dim) == (16, 16)
    assert cond.shape == (2, 4, 16) and z.shape == (2, 16, 16)
    rows, t = tokens[:, :5], torch.tensor(500.0)
    prediction = policy.head(rows, t, z[:, :5])
    assert prediction.shape == (2, 5, 16) and prediction.dtype == torch.float32
    again = policy.head_conditioned(rows, policy.head_time(t), policy.head_condition(z[:, :5]))
    torch.testing.assert_close(again, prediction, rtol=0, atol=0)
    images = policy.decode(tokens)
    assert images.shape == (2, 32, 32, 3) and images.dtype == torch.uint8


def test_pictures_become_the_tokens_that_decode_to_them() -> None:
    policy = tiny.policy()
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    tokens = policy.encode_images(images)
    assert tokens.shape == (3, 16, 16) and not tokens.requires_grad
    latents = policy.vae.encode(images)
    assert torch.equal(policy.transformer.unpatchify(tokens), latents)
    assert torch.equal(policy.decode(tokens), policy.vae.decode(latents))
    with pytest.raises(InputError, match=r"images are .64, 64. px, the model makes .32, 32. px"):
        policy.encode_images(np.zeros((1, 64, 64, 3), np.uint8))


def test_the_unconditional_input_is_the_empty_prompt() -> None:
    policy = tiny.policy()
    conditioning = policy.encode_prompts(["a dog", "two red apples"])
    empty = policy.encode_prompts(["", ""])
    assert torch.equal(conditioning.unconditional().text, empty.text)
    assert conditioning.unconditional(5).text.shape == (5, 8, 16)
    assert torch.equal(conditioning.text[0, 2:], empty.text[0, 2:])
    assert not torch.equal(conditioning.text[0, :2], empty.text[0, :2])


def test_only_the_transformer_trains() -> None:
    policy = tiny.policy()
    trained = {id(p) for p in policy.parameters() if p.requires_grad}
    trunk, head = ({id(p) for p in part} for part in (policy.trunk_parameters(), policy.head_parameters()))
    unused = {id(p) for p in policy.transformer.video_encoder.patch_embed.parameters()}
    assert not trunk & head and trunk | head | unused == trained
    assert trained == {id(p) for p in policy.transformer.parameters()}


def test_a_trainable_text_encoder_gets_its_gradient_through_the_trunk() -> None:
    policy = tiny.policy()
    policy.text.requires_grad_(True)
    cond = policy.condition(policy.pad_text(policy.text.encode_trainable(["a dog", ""])))
    policy.ar_latents(torch.zeros(2, 16, 16), torch.zeros(2, 16, dtype=torch.bool), cond).square().sum().backward()
    gradient = policy.text.get_parameter("model.layers.0.mlp.fc1.weight").grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_building_follows_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = (tiny.policy(seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["transformer.mask_embed.mask_token"], other["transformer.mask_embed.mask_token"])


def test_schedules() -> None:
    flow = tiny.policy().schedule(6, eta=0.3)
    assert isinstance(flow, FlowSchedule) and flow.num_steps == 6 and flow.stochastic(0) and not flow.stochastic(5)
    assert not any(tiny.policy().schedule(6, eta=0.0).stochastic(j) for j in range(6))
    assert isinstance(tiny.policy(scheduler={"_class_name": "DDPMScheduler"}).schedule(6), DdpmSchedule)
    with pytest.raises(InputError, match="'ddim5' is a respacing"):
        tiny.policy().schedule("ddim5")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vae": {"latent_channels": 8}}, "image_dim against vae latent_channels, 4 != 8"),
        ({"text": {"hidden_size": 32}}, "text_token_dim against text_encoder hidden_size, 16 != 32"),
        (
            {"transformer": {"image_stride": 8, "image_size": [64, 64]}},
            "image_stride against pixels per vae latent, 8 != 4",
        ),
        ({"scheduler": {"_class_name": "EulerDiscreteScheduler"}}, "EulerDiscreteScheduler"),
        ({"scheduler": {"shft": 3.0}}, "shft"),
    ],
)
def test_parts_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.policy(**changes)
