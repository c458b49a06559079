"""Harmon: a language model between the two halves of a MAR (arXiv 2503.21979), text to image.

At each AR step MAR's encoder reads the tokens that are known, behind K buffer slots that hold `fake_latent`. Its output
passes through the frozen language model, after the prompt and causally, tokens before buffer; what the model adds to it
is the prompt's only way into the image. MAR's decoder and diffusion head go on from there.

Only visible tokens and buffer enter the language model, and the prompt enters it once (see `qwen.Qwen`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from mar_grpo.errors import InputError
from mar_grpo.models.blocks import Linear, initialise, known_places
from mar_grpo.models.kl16 import Kl16
from mar_grpo.models.layouts import HOUSEKEEPING
from mar_grpo.models.mar import Mar, MarConfig, MarFamilyPolicy
from mar_grpo.models.policy import FEATURES, Conditioning
from mar_grpo.models.qwen import Qwen
from mar_grpo.models.text import ChatPrompts
from mar_grpo.store import Store

WHERE = "config.json"


@dataclass(frozen=True)
class HarmonConfig:
    """The published config.json.

    Args:
        llm: content of a Qwen2 config.json.
        mar: sizes of the MAR; its grid is the one that the position tables were trained on.
        image_size: (height, width) of the images to make, px, where it is not that of `mar` (ours, not published).
    """

    llm: dict[str, Any]
    mar: MarConfig
    image_size: tuple[int, int] | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> HarmonConfig:
        """Read a published config. Raises InputError naming the key that is missing, unknown or wrong."""
        given = {key: value for key, value in config.items() if key not in HOUSEKEEPING and not key.startswith("_")}
        if given.pop("model_type", "harmon") != "harmon":
            raise InputError(f"model_type is {config['model_type']!r}, not 'harmon'", where=WHERE)
        for key in ("llm", "mar"):
            if not isinstance(given.get(key), Mapping):
                raise InputError(f"{key} must be an object", where=WHERE)
        size = given.pop("image_size", None)
        if size is not None and not (isinstance(size, list | tuple) and [type(side) for side in size] == [int, int]):
            raise InputError(f"image_size must be height and width in px, is {size!r}", where=WHERE)
        unknown = sorted(given.keys() - {"llm", "mar"})
        if unknown:
            raise InputError(f"unknown key {unknown[0]!r}", where=WHERE)
        made = cls(dict(given["llm"]), MarConfig.from_dict(dict(given["mar"])), tuple(size) if size else None)
        pixels = made.mar.token_pixels
        if any(side < pixels or side % pixels for side in made.image_size or ()):
            raise InputError(f"image_size: {size} is no multiple of {pixels} px a token", where=WHERE)
        return made

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        size = {} if self.image_size is None else {"image_size": list(self.image_size)}
        return {"model_type": "harmon", "llm": self.llm, "mar": self.mar.to_dict(), **size}

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of tokens of an image."""
        if self.image_size is None:
            return self.mar.grid
        return self.image_size[0] // self.mar.token_pixels, self.image_size[1] // self.mar.token_pixels


class Harmon(nn.Module):
    """The network of a Harmon checkpoint, without the autoencoder; keys are the published ones.

    Args:
        generator: fills the weights; without it MAR and projections are zeros and the language model is on the meta
            device.
    """

    def __init__(self, config: HarmonConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.llm = Qwen.from_config(config.llm, generator)
        self.mar = Mar(config.mar, config.grid)
        inside, outside = self.llm.config.hidden_size, config.mar.encoder_embed_dim
        self.proj_in = nn.Sequential(Linear(outside, inside), nn.SiLU(), Linear(inside, inside))
        self.proj_out = nn.Sequential(Linear(inside, inside), nn.SiLU(), Linear(inside, outside))
        if generator:
            self.mar.initialise_parameters(generator)
            initialise(self.proj_in, generator)
            initialise(self.proj_out, generator)

    def ar_latents(
        self,
        tokens: Tensor,
        known: Tensor,
        cond: Tensor,
        *,
        num_known: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Conditioning z of the head; arguments as `Policy.ar_latents`, cond [B, T, F] a packed prompt of `llm`."""
        places = known_places(known, num_known)
        x = self.bridge(self.mar.encode(tokens, places, self.mar.fake_latent[None]), cond)
        return self.mar.decode(x, places, wanted)

    def bridge(self, x: Tensor, prompt: Tensor) -> Tensor:
        """Encoder output [B, K + n, De], buffer first, plus what the language model makes of it after `prompt`."""
        return x + self.proj_out(self._buffer_first(self.llm(self.to_llm(x), prompt).to(x.dtype)))

    def to_llm(self, x: Tensor) -> Tensor:
        """Encoder output [B, K + n, De] as the language model reads it, [B, n + K, H]: the buffer comes last."""
        return self.proj_in(x).roll(-self.config.mar.buffer_size, dims=1)

    def _buffer_first(self, x: Tensor) -> Tensor:
        return x.roll(self.config.mar.buffer_size, dims=1)


class HarmonPolicy(MarFamilyPolicy):
    """Harmon as a policy: MAR is trained (head aside); language model, projections and autoencoder are frozen.

    Args:
        vae: the KL-16 autoencoder.
        tokenizer: of the language model.

    Raises:
        InputError: the parts do not fit together.
    """

    transformer: Harmon
    text: ChatPrompts

    def __init__(self, transformer: Harmon, vae: Kl16, tokenizer: Tokenizer) -> None:
        super().__init__()
        mar, llm = transformer.config.mar, transformer.llm
        self._join(transformer, mar, vae)
        room = llm.config.max_position_embeddings - mar.buffer_size - transformer.mar.num_tokens
        for part in (llm, transformer.proj_in, transformer.proj_out):
            part.requires_grad_(False)
        self.text = ChatPrompts(llm, tokenizer, room)

    @property
    def image_network(self) -> Mar:
        return self.transformer.mar

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Packed prompts, each read once and cached, padded on the right by 16 or more to a multiple of 64.

        So attention has the same shape, and what is left over at its end is padding, whatever prompts are together: an
        image does not depend on its batch.
        """
        *packed, empty = self.text.encode([*prompts, None])
        length = -(-(max(map(len, packed)) + 16) // 64) * 64
        return Conditioning(torch.stack([F.pad(part, (0, 0, 0, length - len(part))) for part in packed]), empty)

    def keep_features(self, store: Store, prefix: str = FEATURES) -> None:
        self.text.cache.keep(store, prefix)

    def condition(self, conditioning: Conditioning) -> Tensor:
        """[B, T, F], see `qwen.Qwen`; no gradient."""
        return conditioning.text

    def trunk_parameters(self) -> list[nn.Parameter]:
        """MAR's encoder and decoder. `class_emb` is in the checkpoint, but reaches no output."""
        unused = self.transformer.mar.class_emb.weight
        return [value for value in self.transformer.mar.trunk_parameters() if value is not unused]

    def frozen_copy(self) -> Self:
        """The same policy with a MAR of its own, without gradient; the other parts are shared."""
        network = self.transformer
        shared = (self.vae, self.text, network.llm, network.proj_in, network.proj_out)
        copied = copy.deepcopy(self, {id(part): part for part in shared})
        copied.transformer.requires_grad_(False)
        return copied
