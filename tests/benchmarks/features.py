"""python -m tests.benchmarks.features: from which size on is reading a prompt's features faster than making them?

CPU milliseconds a prompt for random Phi models on one thread, against a store on this machine's disk.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch

from mar_grpo.models.features import LARGE
from mar_grpo.models.text import TextEncoder
from mar_grpo.store import Store
from tests.unit import tiny

SIZES = {96: 2, 256: 4, 512: 6, 1024: 8}  # width: layers
PROMPTS = [f"a photo of two red apples {place} a dog" for place in ("left", "right", "above", "below")]


def milliseconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1000 / len(PROMPTS)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'parameters':>12}{'make':>10}{'write':>10}{'read':>10}{'digest, once':>14}    (CPU ms a prompt)")
    for width, layers in SIZES.items():
        config = tiny.TEXT | {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        config |= {"num_attention_heads": width // 32}
        text = TextEncoder.from_config(config, tiny.tokenizer(), 16, torch.Generator().manual_seed(0))
        text.encode(["a"])
        with tempfile.TemporaryDirectory() as folder:
            make = milliseconds(lambda text=text: text.encode(PROMPTS))
            text.cache.keep(Store(folder), "features", at_least=0)
            text.cache._features.clear()
            digest = milliseconds(lambda text=text: text.encode(["a"])) * len(PROMPTS)
            write = milliseconds(lambda text=text: text.encode(PROMPTS)) - make
            text.cache._features.clear()
            read = milliseconds(lambda text=text: text.encode(PROMPTS))
        count = sum(parameter.numel() for parameter in text.parameters())
        print(f"{count:12,}{make:10.1f}{write:10.1f}{read:10.1f}{digest:14.1f}")
    print(f"kept from {LARGE:,} parameters on")


if __name__ == "__main__":
    main()
