"""NOVA as a policy: transformer, autoencoder, text encoder and schedule of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from mar_grpo.diffusion import ddpm, flow
from mar_grpo.diffusion.gaussian import Schedule
from mar_grpo.errors import InputError
from mar_grpo.models.build import on_meta
from mar_grpo.models.nova import NovaConfig, NovaTransformer, mask_schedule
from mar_grpo.models.policy import FEATURES, Conditioning, Policy
from mar_grpo.models.text import TextEncoder
from mar_grpo.models.vae import Vae
from mar_grpo.store import Store


class NovaPolicy(Policy):
    """Text to image. Autoencoder and text encoder start frozen.

    Raises:
        InputError: the parts do not fit together.
    """

    transformer: NovaTransformer
    vae: Vae
    text: TextEncoder

    def __init__(self, transformer: NovaTransformer, vae: Vae, text: TextEncoder, scheduler: Mapping[str, Any]) -> None:
        super().__init__()
        config = transformer.config
        for what, ours, theirs in (
            ("image_dim against vae latent_channels", config.image_dim, vae.config["latent_channels"]),
            ("image_stride against pixels per vae latent", config.image_stride, vae.stride),
            ("text_token_dim against text_encoder hidden_size", config.text_token_dim, text.dim),
        ):
            if ours != theirs:
                raise InputError(f"parts do not fit: {what}, {ours} != {theirs}", where="transformer/config.json")
        self.transformer, self.scheduler_config = transformer, dict(scheduler)
        self.vae, self.text = vae.requires_grad_(False), text.requires_grad_(False)
        self.schedule(1)

    @classmethod
    def from_configs(
        cls,
        transformer: Mapping[str, Any],
        vae: Mapping[str, Any],
        text: Mapping[str, Any],
        tokenizer: Tokenizer,
        scheduler: Mapping[str, Any],
        generator: torch.Generator | None = None,
    ) -> NovaPolicy:
        """A new policy from the contents of the published config files, filled from `generator`.

        Without a generator no weight has a value yet: they are on the meta device.
        """
        config = NovaConfig.from_dict(dict(transformer))
        model = NovaTransformer(config) if generator else on_meta(lambda: NovaTransformer(config))
        if generator:
            model.initialise_parameters(generator)
        encoder = TextEncoder.from_config(text, tokenizer, config.text_token_len, generator)
        return cls(model, Vae.from_config(vae, generator), encoder, scheduler)

    def schedule(self, num_steps: int | str, *, eta: float = 0.7, last_step_deterministic: bool = True) -> Schedule:
        """DDPM or flow, as the checkpoint's scheduler_config.json says; nothing follows from the family's name."""
        if isinstance(num_steps, str):
            raise InputError(f"diffusion_steps {num_steps!r} is a respacing, a NOVA checkpoint takes a number of steps")
        with torch.device("cpu"):  # tables are computed, also where models are built on meta
            if self.scheduler_config.get("_class_name") == ddpm.FAMILY:
                made: Schedule = ddpm.DdpmSchedule.from_config(self.scheduler_config, num_steps)
            else:
                made = flow.FlowSchedule.from_config(
                    self.scheduler_config, num_steps, eta=eta, last_step_deterministic=last_step_deterministic
                )
        return made.to(self.device)

    def mask_schedule(self, ar_steps: int) -> list[int]:
        return mask_schedule(self.num_tokens, ar_steps)

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Text features of each prompt, padded with the transformer's stored rows. Cached per prompt, no gradient."""
        return self.pad_text(self.text.encode(prompts))

    def pad_text(self, features: Sequence[Tensor]) -> Conditioning:
        """Conditioning of given text features [n_i, text_dim] each (SFT passes `text.encode_trainable(...)`)."""
        length = self.transformer.config.text_token_len
        return Conditioning(self.transformer.pad_text(features), self.transformer.text_embed.weight[:length])

    def keep_features(self, store: Store, prefix: str = FEATURES) -> None:
        self.text.cache.keep(store, prefix)

    def condition(self, conditioning: Conditioning) -> Tensor:
        """Frame tokens [B, Nv, D]; gradient flows."""
        return self.transformer.condition(conditioning.text)

    def condition_parameters(self) -> list[nn.Parameter]:
        """Text projection and video encoder."""
        image = {id(value) for value in self.transformer.image_encoder.parameters()}
        image.add(id(self.transformer.mask_embed.mask_token))
        return [value for value in self.trunk_parameters() if id(value) not in image]
