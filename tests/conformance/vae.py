"""A folder of the `vae` set: the KL-16 autoencoder, every recorded tensor from image to bytes and each one between.

The weights are loaded under their published (LDM) names, so the name table of `models/kl16.py` is checked as well.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.vae import harmon_bytes, mar_bytes
from tests.conformance.checks import Comparison

TOLERANCE = {"atol": 5e-5, "rtol": 1e-4}


def check(folder: Path, compare: Comparison) -> None:
    settings = Kl16Config.from_dict(compare.manifest["config"])
    vae = Kl16(settings, harmon_bytes)
    weights = compare.weights()
    names = vae.published_names()
    compare.same("weights.names", sorted(names.values()) == sorted(weights), True)
    state = {ours: weights[theirs].view_as(vae.model.state_dict()[ours]) for ours, theirs in names.items()}
    vae.model.load_state_dict(state, strict=True, assign=True)
    guessed = Kl16Config.from_shapes({name: tensor.shape for name, tensor in weights.items()}, where=str(folder))
    compare.same("weights.config", _network(guessed), _network(settings))
    with torch.no_grad():
        _encoder(vae, compare)
        _decoder(vae, compare)


def _network(settings: Kl16Config) -> list[int]:
    """What shapes alone tell about a configuration, as numbers."""
    sides = [settings.resolution >> level for level in range(len(settings.ch_mult))]
    attention = [side in settings.encoder_attn_resolutions for side in sides]
    attention += [side in settings.decoder_attn_resolutions for side in sides]
    sizes = [settings.ch, *settings.ch_mult, settings.num_res_blocks, settings.z_channels, settings.embed_dim]
    return sizes + [int(there) for there in attention]


def _encoder(vae: Kl16, compare: Comparison) -> None:
    image = compare.input("image")
    blocks = dict(enumerate(vae.model.encoder.down_blocks))
    seen = {f"enc.down{level}_out": _recorded(block) for level, block in blocks.items()}
    seen["enc.h"] = _recorded(vae.model.encoder)
    seen["enc.moments"] = _recorded(vae.model.quant_conv)
    mean, log_variance = vae.moments(image)
    for name, outputs in seen.items():
        if name in compare.names():
            compare.equal(name, outputs[0], **TOLERANCE)
    compare.equal("enc.mean", mean, **TOLERANCE)
    compare.equal("enc.logvar", log_variance, **TOLERANCE)
    posterior = vae.model.encode(image).latent_dist
    compare.equal("enc.mean", posterior.mode(), **TOLERANCE)
    compare.equal("enc.sample", mean + (0.5 * log_variance).exp() * compare.input("enc.noise"), **TOLERANCE)
    compare.equal("enc.kl", posterior.kl(), **TOLERANCE)
    compare.equal("enc.scaled_mode", vae.scale(mean), **TOLERANCE)


def _decoder(vae: Kl16, compare: Comparison) -> None:
    z = compare.input("dec.z")
    seen = {"dec.post_quant": _recorded(vae.model.post_quant_conv), "dec.mid": _recorded(vae.model.decoder.mid_block)}
    pixels = vae.decode_float(vae.scale(z))
    for name, outputs in seen.items():
        compare.equal(name, outputs[0], **TOLERANCE)
    compare.equal("dec.image", pixels, **TOLERANCE)
    for name, convert in (("dec.u8_harmon", harmon_bytes), ("dec.u8_mar", mar_bytes)):
        compare.equal(name, convert(compare.golden("dec.image")).permute(0, 3, 1, 2))
        vae.to_bytes = convert
        compare.equal(name, vae.decode(vae.scale(z)).permute(0, 3, 1, 2), atol=1)  # one level where rounding turns


def _recorded(module: nn.Module) -> list[Tensor]:
    """The outputs that `module` will give, in order."""
    outputs: list[Tensor] = []
    module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    return outputs
