"""What the NOVA trunk and head promise beyond the recorded vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mar_grpo.errors import InputError
from mar_grpo.models.blocks import Block, initialise
from mar_grpo.models.nova import NovaConfig, NovaTransformer

TINY = {
    "_class_name": "NOVATransformer3DModel",
    "image_dim": 3,
    "image_size": [32, 48],
    "image_stride": 8,
    "text_token_dim": 20,
    "text_token_len": 5,
    "image_base_size": [2, 3],
    "video_base_size": [1, 2, 2],
    "rotary_pos_embed": False,
    "arch": ["vit_d2w24", "vit_d3w24", "mlp_d2w32"],
    "num_heads": [2, 4],
}
PUBLISHED = {
    **{key: value for key, value in TINY.items() if key != "num_heads"},
    "image_dim": 4,
    "image_size": [512, 512],
    "text_token_dim": 2560,
    "text_token_len": 256,
    "image_base_size": [32, 32],
    "video_base_size": [1, 16, 16],
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomise(model: NovaTransformer) -> NovaTransformer:
    """Every parameter random, so that no zero hides a mistake."""
    generator = seeded(1)
    for value in model.state_dict().values():
        value.normal_(0.0, 0.3, generator=generator)
    return model


@pytest.fixture
def model() -> NovaTransformer:
    return randomise(NovaTransformer(NovaConfig.from_dict(TINY)))


@pytest.fixture
def inputs(model: NovaTransformer) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [4, 6, 12], known with two True a row, condition [4, 4, 24]."""
    tokens = torch.randn(4, 6, 12, generator=seeded(2))
    known = torch.rand(4, 6, generator=seeded(3)).argsort(dim=1) < 2
    text = torch.randn(4, 5, 20, generator=seeded(4))
    return tokens, known, model.condition(text).detach()


def test_unknown_tokens_are_never_read(model: NovaTransformer, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, known, cond = inputs
    z = model.ar_latents(tokens, known, cond)
    poisoned = tokens.masked_fill(~known[..., None], float("nan"))
    assert torch.equal(model.ar_latents(poisoned, known, cond), z)


def test_known_tokens_and_condition_are_read(model: NovaTransformer, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, known, cond = inputs
    z = model.ar_latents(tokens, known, cond)
    other = model.ar_latents(tokens + known[..., None], known, cond)
    assert (other - z).abs().amin(dim=(0, 1)).max() > 1e-3
    assert (model.ar_latents(tokens, known, cond + 1) - z).abs().max() > 1e-3


def test_rows_do_not_depend_on_their_batch(model: NovaTransformer, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, known, cond = inputs
    z = model.ar_latents(tokens, known, cond)
    torch.testing.assert_close(model.ar_latents(tokens[2:3], known[2:3], cond[2:3]), z[2:3])


def test_wanted_rows_equal_the_gather(model: NovaTransformer, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, known, cond = inputs
    z = model.ar_latents(tokens, known, cond)
    wanted = torch.tensor([[0, 5], [3, 1], [2, 2], [4, 0]])
    some = model.ar_latents(tokens, known, cond, num_known=2, wanted=wanted)
    torch.testing.assert_close(some, z.gather(1, wanted[..., None].expand(-1, -1, 24)))


@pytest.mark.parametrize("count", [0, 6])
def test_nothing_or_everything_known(model: NovaTransformer, inputs: tuple[Tensor, Tensor, Tensor], count: int) -> None:
    tokens, _, cond = inputs
    z = model.ar_latents(tokens, torch.full((4, 6), count == 6), cond)
    assert z.shape == (4, 6, 24)
    assert z.isfinite().all()


def test_unequal_numbers_of_known_tokens_are_refused(
    model: NovaTransformer, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    tokens, known, cond = inputs
    known[3] = True
    with pytest.raises(InputError, match="same number of known tokens"):
        model.ar_latents(tokens, known, cond)


def test_head_on_a_subset_equals_the_gather(model: NovaTransformer) -> None:
    x, z = torch.randn(4, 6, 12, generator=seeded(5)), torch.randn(4, 6, 24, generator=seeded(6))
    t = torch.tensor(730.5)
    everything = model.head(x, t, z)
    keep = torch.rand(4, 6, generator=seeded(7)) < 0.5
    torch.testing.assert_close(model.head(x[keep], t, z[keep]), everything[keep])


def test_trajectories_and_times_broadcast(model: NovaTransformer) -> None:
    x, z = torch.randn(3, 7, 12, generator=seeded(8)), torch.randn(7, 24, generator=seeded(9))
    t = torch.tensor([900.0, 400.0, 3.5])
    together = model.head_conditioned(x, model.head_time(t[:, None]), model.head_condition(z))
    for s in range(3):
        torch.testing.assert_close(together[s], model.head(x[s], t[s].expand(7), z), rtol=1e-4, atol=1e-4)


def test_every_trunk_and_head_parameter_gets_a_gradient(
    model: NovaTransformer, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    tokens, known, _ = inputs
    text = model.pad_text([torch.randn(n, 20, generator=seeded(n)) for n in (0, 2, 5, 3)])
    z = model.ar_latents(tokens, known, model.condition(text))
    model.head(tokens, torch.tensor(500.0), z).square().sum().backward()
    for value in (*model.trunk_parameters(), *model.head_parameters()):
        assert value.grad is not None
        assert value.grad.abs().max() > 0
    rest = {name for name, value in model.named_parameters() if value.grad is None}
    assert rest == {"video_encoder.patch_embed.proj.weight", "video_encoder.patch_embed.proj.bias"}
    assert len(model.trunk_parameters()) + len(model.head_parameters()) + 2 == len(list(model.parameters()))


def test_pad_text_keeps_the_gradient_and_refuses_long_prompts(model: NovaTransformer) -> None:
    feature = torch.randn(2, 20, generator=seeded(0)).requires_grad_()
    padded = model.pad_text([feature, feature[:0]])
    assert torch.equal(padded[0, 2:], model.text_embed.weight[2:5])
    assert torch.equal(padded[1], model.text_embed.weight[:5])
    padded.sum().backward()
    assert torch.equal(feature.grad, torch.ones(2, 20))
    with pytest.raises(InputError, match=r"6 text tokens, the model takes 5 \(prompt 1"):
        model.pad_text([feature, torch.zeros(6, 20)])


def test_building_and_initialising_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    models = [NovaTransformer(NovaConfig.from_dict(TINY)) for _ in range(2)]
    for model in models:
        model.initialise_parameters(seeded(11), residual_norm_gain=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_first_values() -> None:
    model = NovaTransformer(NovaConfig.from_dict(TINY))
    initialise(model, seeded(0), residual_norm_gain=0.5)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    assert len(blocks) == 5
    assert all((block.norm1.weight == 0.5).all() and (block.norm2.weight == 0.5).all() for block in blocks)
    assert (model.image_encoder.norm.weight == 1).all()
    assert (model.image_decoder.blocks[0].norm2.weight == 1).all()
    for loose in (model.mask_embed.mask_token, model.mask_embed.bos_token, model.text_embed.weight):
        assert 0.01 < loose.std() < 0.03
    x, z = torch.randn(9, 12, generator=seeded(1)), torch.randn(9, 24, generator=seeded(2))
    assert (model.head(x, torch.tensor(10.0), z) == 0).all()
    positions = NovaTransformer(NovaConfig.from_dict(TINY)).image_pos
    assert torch.equal(model.image_pos, positions)


def test_half_precision_weights_keep_times_in_float32(
    model: NovaTransformer, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    tokens, known, cond = inputs
    x, z = torch.randn(5, 12, generator=seeded(1)), torch.randn(5, 24, generator=seeded(2))
    near = torch.tensor([[801.0], [802.0]])  # bfloat16 cannot tell these apart
    exact, full = model.head(x, near, z), model.ar_latents(tokens, known, cond)
    model.to(torch.bfloat16)
    rough = model.head(x, near, z)
    assert rough.dtype == torch.bfloat16
    assert (rough[0] != rough[1]).any()
    assert (rough.float() - exact).abs().max() < 0.1 * exact.abs().max()
    assert (model.ar_latents(tokens, known, cond).float() - full).abs().max() < 0.1 * full.abs().max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_sise": 2}, "unknown key 'patch_sise'"),
        ({"_class_name": "UNet2DConditionModel"}, "_class_name is 'UNet2DConditionModel'"),
        ({"num_heads": None}, "num_heads is needed: width 24"),
        ({"num_heads": 5}, "num_heads: width 24 is not divisible by 5"),
        ({"num_heads": 0}, "num_heads"),
        ({"arch": ["vit_d2w24", "vit_d3w32", "mlp_d2w32"]}, "arch: the two ViTs must have one width"),
        ({"arch": ["vit_d2w24", "resnet", "mlp_d2w32"]}, "arch: 'resnet'"),
        ({"video_base_size": [9, 2, 2]}, "video_base_size: 9 frames"),
        ({"video_mixer_rank": 16}, "video_mixer_rank"),
        ({"rotary_pos_embed": True}, "rotary_pos_embed"),
        ({"image_base_size": [2, 2]}, "image_base_size"),
        ({"patch_size": 1}, "image_base_size"),
        ({"text_token_len": 513}, "text_token_len"),
        ({"image_dim": 0}, "image_dim"),
    ],
)
def test_wrong_configs_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        NovaConfig.from_dict({**TINY, **change})
    assert "transformer/config.json" in str(caught.value)


def test_missing_key_is_named() -> None:
    with pytest.raises(InputError, match="image_stride: Field required"):
        NovaConfig.from_dict({key: value for key, value in TINY.items() if key != "image_stride"})


def test_config_round_trip() -> None:
    config = NovaConfig.from_dict({**TINY, "patch_size": 1, "image_base_size": [4, 6]})
    assert NovaConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["_class_name"] == "NOVATransformer3DModel"
    assert (config.num_tokens, config.token_dim) == (24, 3)


@pytest.mark.parametrize(
    ("arch", "tensors", "parameters"),
    [
        (["vit_d16w1024", "vit_d32w1024", "mlp_d6w1024"], 659, 647_004_176),
        (["vit_d16w1024", "vit_d32w1024", "mlp_d3w1280"], 635, 642_803_728),
    ],
)
def test_size_of_the_published_512_px_model(arch: list[str], tensors: int, parameters: int) -> None:
    with torch.device("meta"):
        stored = NovaTransformer(NovaConfig.from_dict({**PUBLISHED, "arch": arch})).state_dict()
    assert len(stored) == tensors
    assert sum(value.numel() for value in stored.values()) == parameters
