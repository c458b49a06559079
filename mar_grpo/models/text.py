"""Prompts to features, one row a token: NOVA's text encoder, and the prompts of Harmon's language model.

NOVA's is a Phi model of transformers. The published folders name their class PhiEncoderModel and ship Python for it. It
is Phi's decoder without the language head, so it runs as transformers' PhiModel and nothing of the checkpoint is
executed. Attention is causal and padding comes last, so a prompt's rows do not depend on padding and no attention mask
is needed (NOVA, `reference` section 2: padded rows are replaced by the transformer's own text embedding).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mar_grpo.errors import InputError
from mar_grpo.models.build import initialise, on_meta
from mar_grpo.models.features import FeatureCache
from mar_grpo.models.qwen import Qwen

if TYPE_CHECKING:
    from transformers import PhiModel

PHI_CLASSES = ("PhiModel", "PhiEncoderModel", "PhiForCausalLM")
PAD, UNKNOWN = "<pad>", "<unk>"
NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_dropout": 0.0}  # equal prompts have equal features
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # a user's turn in Qwen's chat template

logger = logging.getLogger(__name__)


class TextEncoder(nn.Module):
    """Prompts -> features, float32 [n_i, text_dim] each: the last hidden state after the final layer norm.

    Args:
        model: transformers' PhiModel.
        tokenizer: a `tokenizers.Tokenizer`; padding and truncation set in it are switched off.
        max_tokens: rows kept of a prompt (the transformer's `text_token_len`).
    """

    def __init__(self, model: PhiModel, tokenizer: Tokenizer, max_tokens: int) -> None:
        super().__init__()
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self.cache = FeatureCache(model, tokenizer, "hidden", max_tokens)
        self._warned = False

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        tokenizer: Tokenizer,
        max_tokens: int,
        generator: torch.Generator | None = None,
    ) -> TextEncoder:
        """A text encoder from the content of text_encoder/config.json; without a generator its weights stay on meta.

        Raises:
            InputError: not a Phi configuration, values PhiModel refuses, or a tokenizer with more ids than embeddings.
        """
        from transformers import PhiConfig, PhiModel  # seconds; most commands never build a model

        where = "text_encoder/config.json"
        names = {
            config.get("model_type", "phi"),
            *(config.get("architectures") or ()),
            config.get("_class_name", "phi"),
        }
        if not names <= {"phi", *PHI_CLASSES}:
            raise InputError(
                f"text encoder {', '.join(sorted(names - {'phi', *PHI_CLASSES}))} is not supported", where=where
            )
        try:
            phi = PhiConfig.from_dict({k: v for k, v in config.items() if k != "auto_map"} | NO_DROPOUT)
            model = on_meta(lambda: PhiModel(phi))
        except Exception as error:  # transformers' strict configurations raise classes of their own
            raise InputError(f"PhiModel refuses its configuration: {error}", where=where) from error
        heads = phi.num_attention_heads
        rotary: Any = model.get_submodule("layers.0.self_attn").rotary_ndims
        if phi.hidden_size % heads or rotary % 2:
            what = f"hidden_size {phi.hidden_size} does not split into {heads} heads of an even rotary width"
            raise InputError(what, where=where)
        if tokenizer.get_vocab_size() > phi.vocab_size:
            what = f"the tokenizer has {tokenizer.get_vocab_size()} ids, the text encoder {phi.vocab_size} embeddings"
            raise InputError(what, where=f"{where}: vocab_size")
        if generator:
            initialise(model, generator)
        model.rotary_emb = type(model.rotary_emb)(phi)  # its tables are computed, not stored: they need real memory
        return cls(model, tokenizer, max_tokens).eval()

    @property
    def config(self) -> dict[str, Any]:
        """The content of text_encoder/config.json."""
        return self.model.config.to_dict() | {"architectures": ["PhiModel"], "dtype": None}

    @property
    def dim(self) -> int:
        """Channels of a feature row (`text_token_dim` of the transformer)."""
        return self.model.config.hidden_size

    def check(self, prompt: str) -> None:
        """Strict mode of data validation: refuse a prompt whose end would be cut off.

        Raises:
            InputError: more tokens than the transformer reads.
        """
        count = len(self.tokenizer.encode(prompt).ids)
        if count > self.max_tokens:
            hint = "shorten the prompt"
            raise InputError(
                f"prompt has {count} tokens, at most {self.max_tokens} are read", where=repr(prompt[:80]), hint=hint
            )

    def token_ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt, cut to `max_tokens` with one warning per encoder."""
        ids: list[int] = self.tokenizer.encode(prompt).ids
        if len(ids) > self.max_tokens and not self._warned:
            self._warned = True
            logger.warning("prompts longer than %d tokens are cut, first: %r", self.max_tokens, prompt[:80])
        return ids[: self.max_tokens]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Features of each prompt, float32 [n_i, text_dim], from a bounded cache that empties when weights change."""
        return self.cache.find(prompts, lambda prompt: self._features([self.token_ids(prompt)])[0])

    def encode_trainable(self, prompts: Sequence[str]) -> list[Tensor]:
        """As `encode`, in one padded batch, without the cache and with gradient (SFT of a small model; RL never)."""
        return self._features([self.token_ids(prompt) for prompt in prompts])

    def _features(self, ids: list[list[int]]) -> list[Tensor]:
        device = self.model.device
        rows = pad_sequence([torch.tensor(row, dtype=torch.long, device=device) for row in ids], batch_first=True)
        if rows.shape[1] == 0:
            return [torch.zeros(0, self.dim, device=device) for _ in ids]
        hidden = self.model(input_ids=rows, use_cache=False).last_hidden_state.float()
        return [hidden[index, : len(row)] for index, row in enumerate(ids)]


class ChatPrompts:
    """Prompts as Harmon's language model remembers them: packed keys and values [n_i, F] (see `qwen.Qwen`).

    Padding and truncation set in the tokenizer are switched off: padding, where a batch needs it, is on the right.

    Args:
        llm: the frozen language model; it belongs to the network, not to this object.
        max_tokens: what a prompt may have, with its template.

    Raises:
        InputError: the tokenizer has more ids than the model has embeddings.
    """

    def __init__(self, llm: Qwen, tokenizer: Tokenizer, max_tokens: int) -> None:
        if tokenizer.get_vocab_size() > llm.config.vocab_size:
            what = f"the tokenizer has {tokenizer.get_vocab_size()} ids, the model {llm.config.vocab_size} embeddings"
            raise InputError(what, where="config.json: llm.vocab_size")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.llm, self.tokenizer, self.max_tokens = llm, tokenizer, max_tokens
        self.cache = FeatureCache(llm.model, tokenizer, "prompt", CHAT)

    def token_ids(self, prompt: str | None) -> list[int]:
        """Ids of "Generate an image: {prompt}" (None: of "Generate an image.") as a user's turn.

        Raises:
            InputError: longer than the model can read.
        """
        task = "Generate an image." if prompt is None else f"Generate an image: {prompt}"
        ids: list[int] = self.tokenizer.encode(CHAT.format(task), add_special_tokens=False).ids
        if len(ids) > self.max_tokens:
            what = f"prompt has {len(ids)} tokens, at most {self.max_tokens} are read"
            raise InputError(what, where=repr((prompt or "")[:80]), hint="shorten the prompt")
        return ids

    def check(self, prompt: str) -> None:
        """InputError when the prompt is longer than the model can read."""
        self.token_ids(prompt)

    def encode(self, prompts: Sequence[str | None]) -> list[Tensor]:
        """Packed prompts [n_i, F] (None: no prompt), from a bounded cache that empties when weights change."""
        return self.cache.find(prompts, self._prefill)

    def _prefill(self, prompt: str | None) -> Tensor:
        ids = torch.tensor([self.token_ids(prompt)], device=self.llm.device)
        return self.llm.prefill(ids)[1][0]


def make_word_tokenizer(words: Iterable[str]) -> Tokenizer:
    """A tokenizer of whole lower-case words (and single marks); any other word becomes <unk>. Ids sorted by word."""
    tokenizer = Tokenizer(models.WordLevel({}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces = sorted({piece for word in words for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word.lower())})
    tokenizer.model = models.WordLevel({piece: index for index, piece in enumerate([PAD, UNKNOWN, *pieces])}, UNKNOWN)
    tokenizer.add_special_tokens([PAD, UNKNOWN])
    return tokenizer
