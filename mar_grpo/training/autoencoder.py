"""Trains the small AutoencoderKL of the shipped checkpoint on emoji scenes.

    python -m mar_grpo.training.autoencoder --out build/vae

Two phases. First encoder and decoder together, with noise on the latent so that neighbouring latents decode alike; then
the latent channels are brought to zero mean and unit variance by folding the statistics into the encoder's last
convolution, and the decoder alone goes on, with more noise, because what it will decode comes from a generator.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from mar_grpo.data.emoji import GLYPHS
from mar_grpo.data.scenes import CELLS, Scene, render_batch
from mar_grpo.models.vae import Vae

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

TINY_VAE = {
    "_class_name": "AutoencoderKL",
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 8,
    "block_out_channels": [8, 16, 32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "act_fn": "silu",
    "sample_size": 64,
    "scaling_factor": 1.0,
    "force_upcast": False,
    "mid_block_add_attention": False,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def random_scene(rng: np.random.Generator) -> Scene:
    """Any objects in any cells: the autoencoder must know all of them, whatever a prompt may ask for."""
    cells = rng.permutation(CELLS)[: rng.integers(1, CELLS + 1)]
    return tuple((int(rng.integers(len(GLYPHS))), int(cell)) for cell in sorted(cells))


def batch(rng: np.random.Generator, size: int) -> torch.Tensor:
    """Pictures of random scenes, float32 [size, 3, 64, 64] in [-1, 1]."""
    images = torch.from_numpy(render_batch([random_scene(rng) for _ in range(size)]))
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def reconstruction_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """L1 + 2 L2 + half the L1 of the image gradients: the last term keeps edges crisp."""
    difference = output - target
    edges = difference.diff(dim=-1).abs().mean() + difference.diff(dim=-2).abs().mean()
    return difference.abs().mean() + 2.0 * difference.square().mean() + 0.5 * edges


@torch.no_grad()
def standardise(kl: AutoencoderKL, rng: np.random.Generator) -> None:
    """Fold the latent's mean and standard deviation into the encoder, so that channels are N(0, 1) over scenes."""
    latents = kl.encode(batch(rng, 512)).latent_dist.mean
    mean, std = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    last, first, channels = kl.encoder.conv_out, kl.decoder.conv_in, len(mean)
    assert last.bias is not None  # for the type checker: both convolutions have one
    last.weight[:channels] /= std[:, None, None, None]
    last.bias[:channels] = (last.bias[:channels] - mean) / std
    first.bias += (first.weight * mean[None, :, None, None]).sum(dim=(1, 2, 3))
    first.weight *= std[None, :, None, None]


def train(out: Path, *, updates: int, batch_size: int, learning_rate: float, seed: int) -> dict[str, float]:
    """Train and save in diffusers' layout. Returns the facts that go beside the weights."""
    rng = np.random.default_rng(seed)
    noise = torch.Generator().manual_seed(seed)
    vae = Vae.from_config(TINY_VAE, torch.Generator().manual_seed(seed))
    kl = vae.model
    kl.to(memory_format=torch.channels_last)  # type: ignore[call-arg]
    joint = int(updates * 0.65)
    began = time.monotonic()
    for phase, steps in (("joint", joint), ("decoder", updates - joint)):
        if phase == "decoder":
            standardise(kl, rng)
        parameters = list(kl.parameters() if phase == "joint" else kl.decoder.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=1e-3)
        for step in range(steps):
            rate = learning_rate * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * math.cos(0.5 * math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate
            images = batch(rng, batch_size).contiguous(memory_format=torch.channels_last)
            with torch.set_grad_enabled(phase == "joint"):
                mean = kl.encode(images).latent_dist.mean
            spread = mean.detach().std() * (0.1 if phase == "joint" else 0.2)
            latents = mean + spread * torch.randn(mean.shape, generator=noise)
            loss = reconstruction_loss(kl.decode(latents).sample, images) + 2e-3 * mean.square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            if step % 50 == 0:
                print(f"{phase} {step}/{steps} loss {loss.item():.4f} {time.monotonic() - began:.0f} s", flush=True)
    facts = evaluate(kl, np.random.default_rng(seed + 1))
    kl.eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-arg]
    kl.save_pretrained(out)
    facts |= {"updates": updates, "batch_size": batch_size, "seed": seed, "seconds": round(time.monotonic() - began)}
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


@torch.no_grad()
def evaluate(kl: AutoencoderKL, rng: np.random.Generator) -> dict[str, float]:
    """PSNR in dB on 512 new scenes, and of latents with noise 0.2; the latent's standard deviation."""
    images = batch(rng, 512)
    latents = kl.encode(images).latent_dist.mean
    generator = torch.Generator().manual_seed(0)
    facts = {"latent_std": round(latents.std().item(), 4)}
    for name, level in (("psnr_db", 0.0), ("psnr_noise_0.2_db", 0.2)):
        output = kl.decode(latents + level * torch.randn(latents.shape, generator=generator)).sample.clamp(-1, 1)
        facts[name] = round(10 * math.log10(4.0 / F.mse_loss(output, images).item()), 2)
    return facts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=2400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    print(json.dumps(train(options.pop("out"), **options)))
