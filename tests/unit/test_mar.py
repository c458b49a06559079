"""MAR's network and policy: configuration, what a forward reads, other grids, classes as prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mar_grpo.errors import InputError
from mar_grpo.models.build import on_meta
from mar_grpo.models.mar import Mar, MarConfig, MarPolicy, mask_schedule
from tests.unit import tiny


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def policy() -> MarPolicy:
    return tiny.mar_policy()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"imgsize": 16}, "unknown key 'imgsize'"),
        ({"diffloss_d": None}, "diffloss_d"),
        ({"encoder_num_heads": 3}, "encoder_num_heads: width 16 is not divisible by 3 heads"),
        ({"img_size": 18}, "img_size: 18 px is no multiple of 4 px a token"),
        ({"img_size": [16, 10]}, "img_size: 10 px is no multiple of 4 px a token"),
        ({"type": "mar_small"}, "type"),
        ({"type": "mar_base"}, "encoder_embed_dim: 16 is not that of mar_base, 768"),
    ],
)
def test_a_wrong_configuration_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        MarConfig.from_dict(tiny.MAR | changes)
    assert message in str(error.value)


def test_a_published_size_stands_for_its_numbers() -> None:
    config = MarConfig.from_dict({"type": "mar_huge", "img_size": 256, "num_sampling_steps": "100"})
    assert (config.encoder_embed_dim, config.decoder_depth, config.encoder_num_heads) == (1280, 20, 16)
    assert (config.diffloss_d, config.diffloss_w, config.num_tokens) == (12, 1536, 256)
    assert MarConfig.from_dict(config.to_dict()) == config
    assert sum(value.numel() for value in on_meta(lambda: Mar(config)).parameters()) == 942_403_104


def test_patches_go_back_where_they_came_from() -> None:
    mar = Mar(MarConfig.from_dict(tiny.MAR | {"img_size": [16, 32], "patch_size": 2}))
    latents = draw(2, 4, 4, 8)
    tokens = mar.patchify(latents)
    assert tokens.shape == (2, 8, 16)
    assert torch.equal(mar.unpatchify(tokens), latents)
    assert torch.equal(tokens[0, 1], latents[0, :, 0:2, 2:4].flatten())  # (c, ph, pw), row-major over the grid


def test_a_forward_reads_known_tokens_and_the_condition_only(policy: MarPolicy) -> None:
    tokens, known = draw(2, 16, 4), torch.zeros(2, 16, dtype=torch.bool)
    known[0, [3, 7]] = known[1, [0, 15]] = True
    cond = policy.condition(policy.encode_prompts(["2", "4"]))
    z = policy.ar_latents(tokens, known, cond)
    assert cond.shape == (2, 1, 16) and z.shape == (2, 16, 24)
    torch.testing.assert_close(policy.ar_latents(torch.where(known[..., None], tokens, 7.0), known, cond), z)
    assert not torch.allclose(policy.ar_latents(tokens + 1, known, cond), z)
    assert not torch.allclose(policy.ar_latents(tokens, known, cond.flip(0)), z)
    wanted = torch.tensor([[5, 0], [15, 2]])
    some = policy.ar_latents(tokens, known, cond, num_known=2, wanted=wanted)
    torch.testing.assert_close(some, z.gather(1, wanted[..., None].expand(-1, -1, 24)))
    known[0, 8] = True
    with pytest.raises(InputError, match="same number of known tokens"):
        policy.ar_latents(tokens, known, cond)


def test_nothing_known_at_the_first_step(policy: MarPolicy) -> None:
    cond = policy.condition(policy.encode_prompts(["0"]))
    z = policy.ar_latents(torch.full((1, 16, 4), torch.nan), torch.zeros(1, 16, dtype=torch.bool), cond)
    assert z.isfinite().all()


def test_other_grids_resize_the_image_part_of_the_positions(policy: MarPolicy) -> None:
    trained = policy.transformer
    wide = Mar(trained.config, grid=(4, 6))
    wide.load_state_dict(trained.state_dict())
    table = trained.decoder_pos_embed_learned
    found = wide._positions(wide.decoder_pos_embed_learned)
    assert torch.equal(found[:3], table[0, :3])
    image = table[:, 3:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    expected = F.interpolate(image, size=(4, 6), mode="bilinear", align_corners=False, antialias=False)
    torch.testing.assert_close(found[3:], expected[0].permute(1, 2, 0).flatten(0, 1))
    tokens = wide.patchify(draw(1, 4, 4, 6))
    assert tokens.shape == (1, 24, 4) and torch.equal(wide.unpatchify(tokens), draw(1, 4, 4, 6))
    z = wide.ar_latents(tokens, torch.arange(24)[None] < 5, wide.fake_latent[None])
    assert z.shape == (1, 24, 24)
    z.sum().backward()
    assert wide.encoder_pos_embed_learned.grad is not None and wide.encoder_pos_embed_learned.grad.any()


@pytest.mark.parametrize(("length", "steps"), [(16, 4), (16, 16), (9, 1), (256, 64), (5, 5)])
def test_every_token_is_committed_once(length: int, steps: int) -> None:
    counts = mask_schedule(length, steps)
    assert sum(counts) == length and min(counts) >= 1 and len(counts) <= steps


def test_a_prompt_is_a_class(policy: MarPolicy) -> None:
    conditioning = policy.encode_prompts(["4", "goldfish"])
    assert conditioning.text.flatten().tolist() == [4, 1]
    rows = policy.transformer.class_emb.weight
    assert torch.equal(policy.condition(conditioning)[:, 0], rows[[4, 1]])
    none = policy.condition(conditioning.unconditional(3))
    assert torch.equal(none, policy.transformer.fake_latent.expand(3, 1, -1))
    for prompt in ("5", "-1", "cat", "", "1.0"):
        with pytest.raises(InputError, match="no such class") as error:
            policy.encode_prompts(["0", prompt])
        assert repr(prompt) in str(error.value)


def test_pictures_become_the_tokens_that_decode_to_them(policy: MarPolicy) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    tokens = policy.encode_images(images)
    assert tokens.shape == (2, 16, 4)
    assert torch.equal(policy.decode(tokens), policy.vae.decode(policy.vae.encode(images)))
    with pytest.raises(InputError, match=r"images are .32, 32. px, the model makes .16, 16. px"):
        policy.encode_images(np.zeros((1, 32, 32, 3), np.uint8))


def test_parts_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="vae_embed_dim against the autoencoder's channels, 8 != 4"):
        tiny.mar_policy(vae_embed_dim=8)
    with pytest.raises(InputError, match="vae_stride against pixels per latent, 8 != 4"):
        tiny.mar_policy(vae_stride=8)


def test_what_trains() -> None:
    policy = tiny.mar_policy()
    trunk, head = ({id(p) for p in part} for part in (policy.trunk_parameters(), policy.head_parameters()))
    assert not trunk & head and trunk | head == {id(p) for p in policy.transformer.parameters()}
    assert not any(p.requires_grad for p in policy.vae.parameters())
    assert {id(p) for p in policy.condition_parameters()} <= trunk
    copied = policy.frozen_copy()
    assert copied.vae is policy.vae and not any(p.requires_grad for p in copied.transformer.parameters())
    assert all(p.requires_grad for p in policy.transformer.parameters())
    with torch.no_grad():
        policy.transformer.fake_latent += 1
    assert not torch.equal(copied.transformer.fake_latent, policy.transformer.fake_latent)
