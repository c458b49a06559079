"""How much memory loading takes: python -m tests.benchmarks.checkpoint_memory [mar harmon nova].

Writes a checkpoint of full-size networks with random weights (2.2 to 3.1 GB, float32) into a temporary folder and loads
it in a process of its own, which reads every value (each has to be finite). Prints the peak of that process's resident
memory, mapped files included. The bound is 1.2 x the checkpoint + 0.5 GiB; exit code 1 when the peak is above.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mar_grpo.models.build import on_meta
from mar_grpo.models.checkpoint import load_policy, save_policy
from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.mar import Mar, MarConfig, MarPolicy
from mar_grpo.models.nova_policy import NovaPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.models.published import QWENS
from mar_grpo.models.text import make_word_tokenizer
from mar_grpo.models.vae import harmon_bytes, mar_bytes
from tests.unit import tiny

TRANSFORMER = tiny.TRANSFORMER | {
    "image_size": [512, 512],
    "image_stride": 8,
    "text_token_len": 256,
    "image_base_size": [32, 32],
    "video_base_size": [1, 16, 16],
    "arch": ["vit_d16w1024", "vit_d32w1024", "mlp_d6w1024"],
}
for key in ("num_heads", "patch_size"):
    TRANSFORMER.pop(key)


def mar() -> Policy:
    """MAR-L."""
    network = on_meta(lambda: Mar(MarConfig.from_dict({"type": "mar_large"})))
    return MarPolicy(network, Kl16(Kl16Config(), mar_bytes))


def harmon() -> Policy:
    """Harmon-0.5B."""
    config = HarmonConfig.from_dict({"llm": QWENS["Qwen2.5-0.5B-Instruct"], "mar": {"type": "mar_base"}})
    return HarmonPolicy(on_meta(lambda: Harmon(config)), Kl16(Kl16Config(), harmon_bytes), make_word_tokenizer(["a"]))


def nova() -> Policy:
    """The transformer of nova-d48w1024; autoencoder and text encoder are tiny."""
    vae = tiny.VAE | {"block_out_channels": [8] * 4}
    for key in ("down_block_types", "up_block_types"):
        vae[key] = [tiny.VAE[key][0]] * 4
    return NovaPolicy.from_configs(TRANSFORMER, vae, tiny.TEXT, tiny.tokenizer(), tiny.FLOW)


FAMILIES: dict[str, Callable[[], Policy]] = {"mar": mar, "harmon": harmon, "nova": nova}


def write(family: str, folder: Path, layout: str) -> int:
    """Save random weights; the bytes of all files."""
    policy = FAMILIES[family]().to_empty(device="cpu")
    block = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    for tensor in policy.state_dict().values():
        tensor.copy_(block.repeat(-(-tensor.numel() // len(block)))[: tensor.numel()].view(tensor.shape))
    save_policy(policy, folder, layout="published" if layout == "published" else "ours")
    if layout == "published":
        (folder / "config.json").unlink()  # as it is published: sizes follow from the tensors
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def peak_bytes() -> int:
    """Peak resident memory of this process (of its present address space: not what it was started from)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def load(folder: Path) -> tuple[int, int]:
    """Peak before (imports) and after."""
    before = peak_bytes()
    policy = load_policy(folder)
    assert all(not parameter.is_meta for parameter in policy.parameters())
    return before, peak_bytes()


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a forked process, whose memory is its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    passed = True
    print(f"{'checkpoint':<18}{'bytes':>15}{'imports':>12}{'peak':>12}{'bound':>12}  MiB")
    for family in parser.parse_args().families or FAMILIES:
        for layout in ("ours", "published") if family == "mar" else ("ours",):
            with tempfile.TemporaryDirectory() as root:
                folder = Path(root, "checkpoint")
                size = alone(write, family, folder, layout)
                imports, peak = alone(load, folder)
            bound = 1.2 * size + 2**29
            passed &= peak <= bound
            figures = "".join(f"{number / 2**20:>12,.0f}" for number in (imports, peak, bound))
            verdict = "ok" if peak <= bound else "TOO MUCH"
            print(f"{family + ', ' + layout:<18}{size:>15,}{figures}  {verdict}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
