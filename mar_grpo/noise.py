"""Noise by name: what is drawn depends on a key of (seed, update, prompt, member ...), never on the order of work.

So an image is the same in any batch, on any number of processes, and after a relaunch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def noise_key(*parts: int) -> int:
    """One 63-bit key of several numbers (seed, update, prompt, member ...): equal parts, equal noise."""
    words = np.random.SeedSequence([part % 2**64 for part in parts]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def draw_noise(keys: Sequence[int], length: int, channels: int, states: int) -> tuple[Tensor, Tensor]:
    """Orders int64 [B, L] and unit noise float32 [states, B, L, C], each image from its own generator."""
    order = torch.empty(len(keys), length, dtype=torch.int64)
    noise = torch.empty(states, len(keys), length, channels)
    for row, key in enumerate(keys):
        generator = torch.Generator().manual_seed(key)
        order[row] = torch.randperm(length, generator=generator)
        noise[:, row] = torch.randn(states, length, channels, generator=generator)
    return order, noise


def with_hypothetical(noise: Tensor, order: Tensor, num_done: int, keys: Sequence[int], index: int) -> Tensor:
    """The noise with fresh values for tokens that are not committed by this step, so that their own stays unused."""
    fresh = torch.empty(noise.shape)
    states, _, length, channels = noise.shape
    for row, key in enumerate(keys):
        generator = torch.Generator().manual_seed(noise_key(key, 1, index))
        fresh[:, row] = torch.randn(states, length, channels, generator=generator)
    own = torch.ones(order.shape, dtype=torch.bool, device=order.device).scatter_(1, order[:, num_done:], False)
    return torch.where(own[..., None], noise, fresh.to(noise.device))
