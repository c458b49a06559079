"""The language model of Harmon: transformers' Qwen2 layers behind a prompt that is read once.

A prompt's keys and values are one float tensor [B, T, layers*2*kv_heads*head_dim + 1] ("packed"): whoever holds it can
index, expand and move it like any other condition. The last column is 1 on tokens and 0 on the padding behind them.
`forward` reads it and keeps nothing, so there is no cache that grows or has to be trimmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mar_grpo.errors import InputError
from mar_grpo.models.build import initialise, on_meta

if TYPE_CHECKING:
    from transformers import Qwen2Model

WHERE = "config.json: llm"


class Qwen(nn.Module):
    """A Qwen2 decoder without its language head (keys `model.*`, as published; a tied `lm_head.weight` is passed over).

    Args:
        model: transformers' Qwen2Model; only its layers are used, in eval mode.
    """

    def __init__(self, model: Qwen2Model) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def from_config(cls, config: Mapping[str, Any], generator: torch.Generator | None = None) -> Qwen:
        """From the content of a Qwen2 config.json; without a generator the weights are left on the meta device.

        Raises:
            InputError: another kind of model, rope scaling, sliding windows, or values Qwen2Model refuses.
        """
        from transformers import Qwen2Config, Qwen2Model  # seconds, as in text.py

        if config.get("model_type", "qwen2") != "qwen2":
            raise InputError(f"language model {config['model_type']} is not supported, qwen2 is", where=WHERE)
        try:
            qwen = Qwen2Config.from_dict(dict(config))
            model: Any = on_meta(lambda: Qwen2Model(qwen))
        except Exception as error:  # transformers' strict configurations raise classes of their own
            raise InputError(f"Qwen2Model refuses its configuration: {error}", where=WHERE) from error
        rope: Any = qwen.rope_parameters
        if rope["rope_type"] != "default" or qwen.use_sliding_window:
            raise InputError("rope scaling and sliding windows are not supported", where=WHERE)
        model.rotary_emb = None  # its table would be rounded with the weights, see `_rotation`
        if generator:
            initialise(model, generator)
        return cls(model).eval()

    @property
    def config(self) -> Any:
        """transformers' Qwen2Config."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    @torch.no_grad()
    def prefill(self, ids: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read prompts, padded on the right if at all.

        Causal attention never looks right, so padding needs no mask here.

        Args:
            ids: int64 [B, T].
            given: [B, T], 1 on tokens, 0 on padding; default all tokens.

        Returns:
            the last hidden state after the final norm [B, T, H], and the packed prompts [B, T, F].
        """
        start = self.model.embed_tokens(ids)
        written: list[Tensor] = []
        hidden = self._run(start, start.new_ones(len(ids), 0, 1), written)
        flag = start.new_ones(*ids.shape, 1) if given is None else given[..., None].to(start)
        return hidden, torch.cat([*written, flag], dim=-1)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        """What the model makes of embeddings x [B, N, H] after packed prompts [B, T, F]: final hidden state [B, N, H].

        Positions go on where the prompt ends, padding not counted. Gradient flows to x.
        """
        return self._run(x, prompt)

    def _run(self, x: Tensor, prompt: Tensor, written: list[Tensor] | None = None) -> Tensor:
        """`written` collects each layer's keys, then values, [B, N, 2*kv_heads*head_dim]."""
        x = x.to(self.model.embed_tokens.weight.dtype)
        given = prompt[..., -1] > 0
        cos, sin = self._rotation(given.sum(1), x.shape[1], given.shape[1], x.dtype)
        # New keys come before those of the prompt: attention has no order, and padding, last, then shifts nothing.
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        seen = torch.cat([causal.expand(len(x), -1, -1), given[:, None].expand(-1, x.shape[1], -1)], dim=2)[:, None]
        layers: Any = self.model.layers
        width = (prompt.shape[2] - 1) // len(layers)
        for index, layer in enumerate(layers):
            own = layer.self_attn
            h = layer.input_layernorm(x)
            query = _rotate(_heads(own.q_proj(h), own.head_dim), cos, sin)
            key = _rotate(_heads(own.k_proj(h), own.head_dim), cos, sin)
            value = _heads(own.v_proj(h), own.head_dim)
            if written is not None:
                written += [part.transpose(1, 2).flatten(2) for part in (key, value)]
            if width:
                old = prompt[..., index * width : (index + 1) * width].to(x.dtype).chunk(2, dim=2)
                key, value = (
                    torch.cat([new, _heads(past, own.head_dim)], dim=2)
                    for new, past in zip((key, value), old, strict=True)
                )
            key, value = (part.repeat_interleave(own.num_key_value_groups, dim=1) for part in (key, value))
            attended = F.scaled_dot_product_attention(query, key, value, seen)
            x = x + own.o_proj(attended.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)

    def _rotation(self, start: Tensor, count: int, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, count, head_dim] of the positions from `start` [B] (at most `longest`) on.

        They are float32 whatever the weights' dtype, and come from a table of whole vector registers: no value is then
        rounded as one left over at the end of a batch.
        """
        own: Any = self.model.get_submodule("layers.0.self_attn")
        rows = torch.arange(-(-(longest + count) // 16) * 16, device=start.device).float()
        steps = torch.arange(0, own.head_dim, 2, device=start.device).float() / own.head_dim
        angle = rows[:, None] * (1.0 / self.config.rope_parameters["rope_theta"] ** steps)
        positions = start[:, None] + torch.arange(count, device=start.device)
        cos, sin = (part.repeat(1, 2).to(dtype)[positions][:, None] for part in (angle.cos(), angle.sin()))
        return cos, sin

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}lm_head.weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, N, heads*head_dim] -> [B, heads, N, head_dim]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; the two halves of a head are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
