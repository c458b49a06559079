"""The policy: the one interface of every family to rollout, loss and evaluation (architecture section 3).

Each family's subclass stands in the file of its model: `NovaPolicy`, `MarPolicy`, `HarmonPolicy`.

Shapes: B images, L tokens an image, C channels of a token, D trunk width, W head width, N condition tokens of F
features, P channels of a prediction (C, or 2 C where the variance is learned: [prediction | variance]).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.errors import InputError
from mar_grpo.store import Store

FEATURES = "text_features"


@dataclass(frozen=True)
class Conditioning:
    """What the prompts of a batch say, text [B, R, F], and the rows that stand for no prompt, empty [R', F].

    NOVA: padded text features. MAR: the class number, int64 [B, 1, 1] (-1: none). Harmon: the frozen prompt cache.
    """

    text: Tensor
    empty: Tensor

    def unconditional(self, batch: int | None = None) -> Conditioning:
        """The same for `batch` (default B) empty prompts."""
        return Conditioning(self.empty.expand(batch or len(self.text), -1, -1), self.empty)


class Policy(nn.Module, ABC):
    """A generator that reinforcement learning can train.

    Attributes:
        transformer: the network that is trained, diffusion head included; its keys are the published ones. All other
            parts are frozen.
    """

    transformer: Any
    vae: Any

    @property
    def image_network(self) -> Any:
        """The part of the transformer that knows tokens and has the diffusion head."""
        return self.transformer

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.image_network.num_tokens

    @property
    def token_dim(self) -> int:
        """C."""
        return self.image_network.token_dim

    @property
    def pixels_per_token(self) -> int:
        """Latent pixels that a token holds, (pixel, channel) in its last axis; 1 where its channels are not split."""
        return self.image_network.pixels_per_token

    @property
    def device(self) -> torch.device:
        """Where the transformer's weights are."""
        return next(self.transformer.parameters()).device

    @abstractmethod
    def schedule(self, num_steps: int | str, *, eta: float = 0.7, last_step_deterministic: bool = True) -> Schedule:
        """The checkpoint's diffusion schedule with `num_steps` inference steps.

        Args:
            num_steps: T; a respacing string where the family knows them ("ddim10").
            eta, last_step_deterministic: of a flow (eta 0: the ODE); the noise of DDPM is its scheduler's own.

        Raises:
            InputError: the scheduler's class, a key or a value is not supported.
        """

    @abstractmethod
    def mask_schedule(self, ar_steps: int) -> list[int]:
        """Tokens that each of `ar_steps` AR steps commits; they sum to L, steps that commit none are dropped."""

    @abstractmethod
    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """What the prompts say, without gradient; InputError names a prompt the family cannot take."""

    @abstractmethod
    def condition(self, conditioning: Conditioning) -> Tensor:
        """Condition tokens [B, N, F]. They depend on the prompt only: one call serves all AR steps."""

    def ar_latents(
        self,
        tokens: Tensor,
        known: Tensor,
        cond: Tensor,
        *,
        num_known: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Conditioning z of the head; gradient flows.

        Args:
            tokens: [B, L, C]; values at unknown places are never read.
            known: bool [B, L], True where committed, as many in each row.
            cond: [B, N, F] from `condition`.
            num_known: that number, when the caller knows it; saves a device synchronisation and the check.
            wanted: int64 [B, M] token indices; only their z is returned.

        Returns:
            z [B, L, D], or [B, M, D] with `wanted`.
        """
        return self.transformer.ar_latents(tokens, known, cond, num_known=num_known, wanted=wanted)

    def head(self, x_t: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Prediction float32 [..., P] for noisy tokens x_t [..., C] at time t (0..1000) under z [..., D]."""
        return self.head_conditioned(x_t, self.head_time(t), self.head_condition(z))

    def head_condition(self, z: Tensor) -> Tensor:
        """The part of the head that depends on z only, [..., W]: compute once, use for all diffusion steps."""
        return self.image_network.head_condition(z)

    def head_time(self, t: Tensor) -> Tensor:
        """The part of the head that depends on the diffusion step only, [..., W]: compute once, use for all tokens."""
        return self.image_network.head_time(t)

    def head_conditioned(self, x_t: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """`head` with `head_time(t)` and `head_condition(z)` computed beforehand."""
        return self.image_network.head_conditioned(x_t, time, condition).float()

    def decode(self, tokens: Tensor) -> Tensor:
        """Images uint8 [B, H, W, 3] of tokens [B, L, C]; no gradient."""
        return self.vae.decode(self.image_network.unpatchify(tokens.detach().float()))

    def encode_images(self, images: Tensor | np.ndarray) -> Tensor:
        """Tokens float32 [B, L, C] of images uint8 [B, H, W, 3]; no gradient. InputError: another size."""
        size = tuple(self.image_network.image_size)
        if tuple(images.shape[1:3]) != size:
            raise InputError(f"images are {tuple(images.shape[1:3])} px, the model makes {size} px")
        return self.image_network.patchify(self.vae.encode(images))

    def trunk_parameters(self) -> list[nn.Parameter]:
        """Everything of the transformer but the diffusion head (and weights no output depends on)."""
        return self.transformer.trunk_parameters()

    def head_parameters(self) -> list[nn.Parameter]:
        """The diffusion head."""
        return self.image_network.head_parameters()

    def condition_parameters(self) -> list[nn.Parameter]:
        """Those of the trunk that `condition` depends on; empty where the condition is frozen."""
        return []

    def keep_features(self, store: Store, prefix: str = FEATURES) -> None:
        """Keep in a store what a large text model makes of prompts, and read it there (see `features.FeatureCache`)."""

    def frozen_copy(self) -> Self:
        """The same policy with a transformer of its own, without gradient; the other parts are shared."""
        shared = {id(part): part for part in self.children() if part is not self.transformer}
        copied = copy.deepcopy(self, shared)
        copied.transformer.requires_grad_(False)
        return copied
