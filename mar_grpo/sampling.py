"""Pictures of prompts as files: the same picture for the same (checkpoint, prompt, seed, settings), however it is made.

An image's noise has a key of prompt and seed, its arithmetic depends neither on the batch nor on the processes
(`models.invariant`; one CPU thread a process), and its PNG is a function of its pixels. The folder

    samples.jsonl       a line an image: prompt, seed, file, sha256, checkpoint, settings
    images/NUMBER.png
    contact_sheet.png   a row a prompt

appears when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mar_grpo.errors import InputError
from mar_grpo.evaluation.pictures import contact_sheet, png_bytes
from mar_grpo.models.invariant import BatchInvariant
from mar_grpo.models.policy import Policy
from mar_grpo.noise import noise_key
from mar_grpo.rollout import Guided, SamplingConfig, roll_out
from mar_grpo.store import canonical_json
from mar_grpo.training.distributed import Processes
from mar_grpo.transports import explain_local

ROWS, SHEET = "samples.jsonl", "contact_sheet.png"
SHEET_PICTURES, SHEET_SIDE = 400, 192  # at most so many on the sheet, each at most so many px high and wide

Progress = Callable[[int, int], None]


def sample(
    policy: Policy,
    prompts: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    sampling: SamplingConfig,
    *,
    checkpoint: str,
    group: Processes,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Draw every prompt (once, however often it is given) with every seed. All processes of the group call it.

    Args:
        out: local folder that does not exist or is empty; shared by the processes.
        sampling: its batch size is that of one process and changes no pixel.
        checkpoint: digest of the policy's checkpoint, for the lines.
        progress: called in the first process with (images done, images in all).

    Raises:
        InputError: `out` is in use; a prompt that the policy refuses; settings that do not fit it.
        RetryableError: the disk is full.
    """
    distinct = list(dict.fromkeys(prompts))
    plan = [(prompt, seed) for prompt in distinct for seed in seeds]
    settings = sampling.model_dump(mode="json", exclude={"batch_size"})
    digits, wave, rows = len(str(len(plan) - 1)), sampling.batch_size * group.world, []
    with _folder(out, group) as folder, _one_thread():
        for first in range(0, len(plan), wave):
            mine = range(len(plan))[first : first + wave][group.rank :: group.world]
            made: list[dict[str, Any]] = []
            with group.together():
                images = draw(policy, [plan[index] for index in mine], sampling) if mine else []
                for index, image in zip(mine, images, strict=True):
                    (prompt, seed), data, name = plan[index], png_bytes(image), f"images/{index:0{digits}d}.png"
                    _write(folder / name, data)
                    digest = hashlib.sha256(data).hexdigest()
                    made.append({"index": index, "prompt": prompt, "seed": seed, "file": name, "sha256": digest})
            rows += [row for part in group.gather(made) for row in part]
            if group.first:
                progress(len(rows), len(plan))
        with group.together():
            if group.first:
                rows.sort(key=lambda row: row["index"])
                lines = [canonical_json(row | {"checkpoint": checkpoint, "settings": settings}) for row in rows]
                _write(folder / ROWS, b"\n".join([*lines, b""]))
                shown = [_thumbnail(folder / row["file"]) for row in rows[:SHEET_PICTURES]]
                columns = len(seeds) if len(seeds) > 1 else math.ceil(math.sqrt(len(shown)))
                _write(folder / SHEET, png_bytes(contact_sheet(np.stack(shown), columns)))
    return out


@torch.no_grad()
def draw(policy: Policy, wanted: Sequence[tuple[str, int]], sampling: SamplingConfig) -> list[np.ndarray]:
    """One batch: an image uint8 [H, W, 3] of each (prompt, seed), the same to the last bit in any other batch."""
    keys = [image_key(prompt, seed) for prompt, seed in wanted]
    with BatchInvariant():
        guided = Guided.of(policy, policy.encode_prompts([prompt for prompt, _ in wanted]), sampling)
        tokens = roll_out(guided, keys).tokens
        return [policy.decode(one[None])[0].numpy() for one in tokens]  # convolutions notice the batch


def image_key(prompt: str, seed: int) -> int:
    """Noise key of one image."""
    return noise_key(seed, int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big"))


@contextlib.contextmanager
def _folder(out: Path, group: Processes) -> Iterator[Path]:
    """A folder beside `out` that all processes write to; it takes the place of `out` when the block ends well."""
    out = out.absolute()
    partial = out.with_name(f".{out.name}.{group.gather(secrets.token_hex(8))[0]}")
    try:
        with group.together():
            if group.first:
                with _explained(out):
                    if out.exists() and (not out.is_dir() or any(out.iterdir())):
                        hint = "give another folder, or remove this one first"
                        raise InputError("the output folder exists and is not empty", where=str(out), hint=hint)
                    (partial / "images").mkdir(parents=True)
        yield partial
        with group.together():
            if group.first:
                with _explained(out):
                    partial.rename(out)  # refused by the system when somebody has put files there meanwhile
    finally:
        if group.first:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise explain_local("write", str(path), error) from error


def _write(path: Path, data: bytes) -> None:
    with _explained(path):
        path.write_bytes(data)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """How a sum is split between threads changes its last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _thumbnail(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        small = picture.convert("RGB")
        small.thumbnail((SHEET_SIDE, SHEET_SIDE), Image.Resampling.LANCZOS)
        return np.asarray(small)
