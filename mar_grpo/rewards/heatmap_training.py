"""Trains the network of the training judge (heatmap.py) on drawn scenes, in some minutes on one thread.

    OMP_NUM_THREADS=1 python -m mar_grpo.rewards.heatmap_training

writes mar_grpo/assets/judges/heatmap.safetensors (half precision) and heatmap.json (how it was made).

Objects lie near the centres of the cells or anywhere. Nearly half of them is spoiled: cut, spliced from two glyphs,
blended, faded, damaged, smeared, stained, warped, or no glyph at all. With e the share of the object that is wrong, the
label gives its class (1 - e) / (1 + 9 e) and MALFORMED the rest: a tenth wrong is where an object stops counting
as one.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from mar_grpo.data import scenes
from mar_grpo.data.emoji import GLYPHS, SHAPES, glyph_rgba, glyphs_of
from mar_grpo.data.scenes import BACKGROUND, CANVAS_PX, CELL_PX, CELLS
from mar_grpo.models.build import initialise, on_meta
from mar_grpo.rewards.heatmap import CHANNELS, GRID, JUNK, NOTHING, STRIDE_PX, HeatmapJudge, HeatmapNet, as_input

SIZES_PX = (25, 26, 26, 26, 27)
SPOILED_SHARE = 0.45
FREE_SHARE = 0.25  # pictures whose objects lie anywhere
JITTER_PX = 3
MAX_OBJECTS = (0.04, 0.26, 0.3, 0.2, 0.2)  # probability of 0, 1, 2, 3, 4 objects

Label = list[tuple[int, float]]  # (class, share), shares sum to one


@dataclass(frozen=True)
class Settings:
    """What changes the weights."""

    seed: int = 0
    updates: int = 2400
    batch: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_updates: int = 50


# --- pictures ----------------------------------------------------------------------------------------------------


def training_batch(rng: np.random.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures and labels.

    Returns:
        pictures float32 [B, 64, 64, 3] in 0..255, labels [B, CHANNELS, GRID, GRID] summing to one over classes, and
        weights [B, GRID, GRID]: 0 beside a centre, where the class is not asked for.
    """
    pictures = np.empty((count, CANVAS_PX, CANVAS_PX, 3), dtype=np.float32)
    pictures[:] = BACKGROUND
    labels = np.zeros((count, CHANNELS, GRID, GRID), dtype=np.float32)
    labels[:, NOTHING] = 1.0
    weights = np.ones((count, GRID, GRID), dtype=np.float32)
    for picture, label, weight in zip(pictures, labels, weights, strict=True):
        for y, x in _centres(rng):
            patch, shares = _object(rng)
            _paste(picture, patch, y, x)
            row, column = round(y / STRIDE_PX), round(x / STRIDE_PX)
            weight[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2] = 0.0
            weight[row, column] = 1.0
            label[:, row, column] = 0.0
            for index, share in shares:
                label[index, row, column] += share
    return _degraded(torch.from_numpy(pictures), rng), torch.from_numpy(labels), torch.from_numpy(weights)


def _centres(rng: np.random.Generator) -> list[tuple[int, int]]:
    count = int(rng.choice(len(MAX_OBJECTS), p=MAX_OBJECTS))
    if rng.random() >= FREE_SHARE:
        cells = rng.permutation(CELLS)[:count]
        jitter = rng.integers(-JITTER_PX, JITTER_PX + 1, size=(count, 2)) * (rng.random() < 0.7)
        corners = [divmod(int(cell), 2) for cell in cells]
        return [
            (y * CELL_PX + CELL_PX // 2 + int(dy), x * CELL_PX + CELL_PX // 2 + int(dx))
            for (y, x), (dy, dx) in zip(corners, jitter, strict=True)
        ]
    centres: list[tuple[int, int]] = []
    for y, x in rng.integers(13, CANVAS_PX - 12, size=(4 * count, 2)).tolist():
        if len(centres) < count and all(max(abs(y - v), abs(x - u)) >= 28 for v, u in centres):
            centres.append((y, x))
    return centres


def _object(rng: np.random.Generator) -> tuple[np.ndarray, Label]:
    """One object, premultiplied float32 [P, P, 4], and its label."""
    size = int(rng.choice(SIZES_PX))
    glyph = int(rng.integers(len(GLYPHS)))
    patch = glyph_rgba(glyph, size)
    if rng.random() >= SPOILED_SHARE:
        return patch, [(glyph, 1.0)]
    other = _other(glyph, rng)
    second = glyph_rgba(other, size)
    kind = rng.choice(["cut", "splice", "blend", "fade", "damage", "smear", "mottle", "mush", "warp", "blob", "pile"])
    wrong = float(rng.uniform(0.12, 0.88))
    if kind == "cut":
        return patch * _half_plane(patch, wrong, rng), _label((glyph, wrong))
    if kind == "splice":
        mask = _half_plane(patch, wrong, rng)
        return patch * mask + second * (1 - mask), _label((glyph, wrong), (other, 1 - wrong))
    if kind == "blend":
        return (1 - wrong) * patch + wrong * second, _label((glyph, wrong), (other, 1 - wrong))
    if kind == "fade":
        return (1 - wrong) * patch, _label((glyph, wrong))
    if kind == "damage":
        side = int(rng.integers(7, 14))
        y, x = rng.integers(3, size - side - 2, size=2)
        spoiled = patch.copy()
        spoiled[y : y + side, x : x + side] = second[y : y + side, x : x + side] if rng.random() < 0.5 else 0.0
        return spoiled, _label((glyph, _visible(patch, spoiled)))
    if kind == "smear":
        sigma = float(rng.uniform(2.0, 4.0))
        return _blur(np.pad(patch, ((6, 6), (6, 6), (0, 0))), sigma), _label((glyph, 0.1 * sigma))
    if kind in ("mottle", "mush", "warp"):
        spoiled = {"mottle": _mottle, "mush": _mush, "warp": _warp}[kind](patch, rng)
        return spoiled, _label((glyph, _visible(patch, spoiled)))
    if kind == "pile":
        shift = rng.integers(6, 11, size=2) * rng.choice([-1, 1], size=2) * rng.permutation([1, int(rng.integers(2))])
        pad = 14
        pile = np.pad(patch, ((pad, pad), (pad, pad), (0, 0)))
        area = pile[pad + shift[0] : pad + shift[0] + size, pad + shift[1] : pad + shift[1] + size]
        area[:] = second + (1 - second[..., 3:]) * area
        corner = pad + shift // 2  # the label belongs to the middle of both
        return pile[corner[0] - 8 : corner[0] + size + 8, corner[1] - 8 : corner[1] + size + 8], [(JUNK, 1.0)]
    return _blob(size, rng), [(JUNK, 1.0)]


def _other(glyph: int, rng: np.random.Generator) -> int:
    """Another glyph; for a coloured shape often the same shape in another colour or another shape in its colour."""
    name, color = GLYPHS[glyph]
    alike = [i for i in glyphs_of(name) if i != glyph]
    if color is not None:
        alike += [i for shape in SHAPES for i in glyphs_of(shape, color) if i != glyph]
    pool = alike if alike and rng.random() < 0.5 else [i for i in range(len(GLYPHS)) if i != glyph]
    return int(rng.choice(pool))


def _label(*parts: tuple[int, float]) -> Label:
    shares = [(glyph, (1 - wrong) / (1 + 9 * wrong)) for glyph, wrong in parts]
    return [*shares, (JUNK, 1.0 - sum(share for _, share in shares))]


def _visible(patch: np.ndarray, spoiled: np.ndarray) -> float:
    """The share that counts as wrong of a change of pixels: a tenth at 15 grey levels root mean square."""
    background = np.array(BACKGROUND, dtype=np.float32)
    change = 255.0 * (spoiled - patch)[..., :3] - (spoiled - patch)[..., 3:] * background
    shown = np.maximum(patch, spoiled)[..., 3] > 0.5
    return min(float(np.sqrt((change[shown] ** 2).mean())) / 150.0, 0.95)


def _mottle(patch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Smooth stains in other colours."""
    stains = _smooth_noise(len(patch), 3, float(rng.uniform(1.0, 4.0)), rng) * float(rng.uniform(0.02, 0.35))
    return np.concatenate(
        [np.clip(patch[..., :3] + stains * patch[..., 3:], 0, patch[..., 3:]), patch[..., 3:]], axis=2
    )


def _mush(patch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The silhouette of the object without its inner detail, a little stained."""
    soft = _blur(patch, float(rng.uniform(1.5, 5.0)))
    inner = soft[..., :3] / np.maximum(soft[..., 3:], 1e-3) * patch[..., 3:]
    return _mottle(np.concatenate([inner, patch[..., 3:]], axis=2).astype(np.float32), rng)


def _warp(patch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The object drawn on rubber."""
    size = len(patch)
    shift = _smooth_noise(size, 2, float(rng.uniform(2.0, 5.0)), rng) * float(rng.uniform(0.2, 5.0))
    y, x = (np.clip(axis, 0, size - 1) for axis in (np.indices((size, size)) + shift.transpose(2, 0, 1)))
    y0, x0 = np.minimum(y.astype(int), size - 2), np.minimum(x.astype(int), size - 2)
    fy, fx = (y - y0)[..., None], (x - x0)[..., None]
    top = patch[y0, x0] * (1 - fx) + patch[y0, x0 + 1] * fx
    return (top * (1 - fy) + (patch[y0 + 1, x0] * (1 - fx) + patch[y0 + 1, x0 + 1] * fx) * fy).astype(np.float32)


def _smooth_noise(size: int, channels: int, sigma_px: float, rng: np.random.Generator) -> np.ndarray:
    noise = _blur(rng.standard_normal((size, size, channels), dtype=np.float32), sigma_px)
    return noise / noise.std()


def _half_plane(patch: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Mask [P, P, 1]: 0 over `share` of the object's area on one side of a line, upright or level half of the time."""
    angle = rng.uniform(0, 2 * math.pi) if rng.random() < 0.5 else math.pi / 2 * rng.integers(4)
    grid = np.arange(len(patch), dtype=np.float32)
    along = (grid[:, None] * math.sin(angle) + grid * math.cos(angle)).astype(np.float32)
    edge = np.quantile(along[patch[..., 3] > 0.5], share)
    return (np.clip(along - edge + 0.5, 0, 1))[..., None]


def _blob(size: int, rng: np.random.Generator) -> np.ndarray:
    """A rectangle or an ellipse in a colour of the art, too small or too long to be one of the shapes."""
    source = glyph_rgba(int(rng.integers(len(GLYPHS))), size).reshape(-1, 4)
    color = rng.permutation(source[source[:, 3] > 0.99])[0]
    long = rng.uniform(5, 15)
    short = rng.uniform(2, 0.65 * long) if long > 9 else rng.uniform(2, long)
    height, width = rng.permutation([long, short])
    grid = np.arange(32, dtype=np.float32) - 15.5
    power = float(rng.choice([2.0, 8.0]))
    distance = np.abs(grid[:, None] / height) ** power + np.abs(grid / width) ** power
    mask = np.clip((1 - distance) * 4 + 0.5, 0, 1)[..., None]
    return (mask * color).astype(np.float32)


def _paste(picture: np.ndarray, patch: np.ndarray, y: int, x: int) -> None:
    top, left = y - len(patch) // 2, x - len(patch) // 2
    y0, x0, y1, x1 = max(top, 0), max(left, 0), min(top + len(patch), CANVAS_PX), min(left + len(patch), CANVAS_PX)
    part = patch[y0 - top : y1 - top, x0 - left : x1 - left]
    picture[y0:y1, x0:x1] = part[..., :3] * 255.0 + (1 - part[..., 3:]) * picture[y0:y1, x0:x1]


def _degraded(pictures: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """What an autoencoder or a generator adds: blur up to 1.1 px, contrast, tint, fine and smooth noise."""
    count = len(pictures)

    def each(low: float, high: float, channels: int = 1) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(low, high, size=(count, 1, 1, channels)).astype(np.float32))

    def noise() -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(pictures.shape, dtype=np.float32))

    blurred = _blur_batch(pictures, each(0.05, 1.1).flatten())
    smooth = _blur_batch(noise(), each(1.5, 3.0).flatten())
    smooth = smooth / smooth.std(dim=(1, 2, 3), keepdim=True) * each(0, 7)
    middle = torch.tensor(BACKGROUND, dtype=torch.float32)
    out = middle + (blurred - middle) * each(0.93, 1.05) + each(-5, 5, 3) + noise() * each(0, 6) + smooth
    return out.clamp(0, 255)


def _blur_batch(pictures: torch.Tensor, sigma_px: torch.Tensor) -> torch.Tensor:
    offsets = torch.arange(pictures.shape[1], dtype=torch.float32)
    weights = torch.exp(-0.5 * ((offsets[:, None] - offsets) / sigma_px[:, None, None]) ** 2)
    weights = weights / weights.sum(dim=2, keepdim=True)
    rows = weights @ pictures.flatten(2)
    columns = rows.view(pictures.shape).transpose(1, 2).flatten(2)
    return (weights @ columns).view(pictures.shape).transpose(1, 2)


def _blur(patch: np.ndarray, sigma_px: float) -> np.ndarray:
    return _blur_batch(torch.tensor(patch)[None], torch.tensor([sigma_px]))[0].numpy()


# --- training ----------------------------------------------------------------------------------------------------


def train(settings: Settings) -> tuple[HeatmapNet, float]:
    """Returns the trained network and the mean loss of the last tenth of the updates."""
    rng = np.random.default_rng(settings.seed)
    net = initialise(on_meta(HeatmapNet), torch.Generator().manual_seed(settings.seed))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay
    )
    rate = functools.partial(_rate, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses: list[float] = []
    started = time.monotonic()
    for update in range(settings.updates):
        pictures, labels, weights = training_batch(rng, settings.batch)
        logits = net(as_input(pictures))
        entropy = -(labels * labels.clamp_min(1e-9).log()).sum(dim=1)
        error = -(labels * logits.log_softmax(dim=1)).sum(dim=1) - entropy
        loss = (error * weights).sum() / settings.batch
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if (update + 1) % 100 == 0:
            facts = {"update": update + 1, "loss": round(float(np.mean(losses[-100:])), 4)}
            print(json.dumps(facts | {"seconds": round(time.monotonic() - started)}), flush=True)
    return net.eval(), float(np.mean(losses[-max(settings.updates // 10, 1) :]))


def _rate(settings: Settings, update: int) -> float:
    warm = min((update + 1) / settings.warmup_updates, 1.0)
    return warm * (0.5 + 0.5 * math.cos(math.pi * update / settings.updates))


def save(net: HeatmapNet, path: Path) -> None:
    """Half precision safetensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().contiguous() for name, tensor in net.state_dict().items()}, path)


def strict_share(judge: HeatmapJudge, count: int, seed: int) -> float:
    """Share of `count` right scenes of the training split that the judge accepts as drawn."""
    rng = np.random.default_rng(seed)
    records = scenes.compositions("train")
    asked = [records[int(i)] for i in rng.integers(len(records), size=count)]
    pictures = scenes.render_batch([scenes.scene_for(record, rng) for record in asked])
    return float(judge.strict(pictures, asked).mean())


def main() -> None:
    """Trains, saves, and records how."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description="Train the network of the training judge.")
    parser.add_argument("--out", type=Path, default=Path("mar_grpo/assets/judges/heatmap.safetensors"))
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--updates", type=int, default=defaults.updates)
    arguments = parser.parse_args()
    settings = Settings(seed=arguments.seed, updates=arguments.updates)
    started = time.monotonic()
    net, loss = train(settings)
    seconds = time.monotonic() - started
    save(net, arguments.out)
    facts = {
        "command": "OMP_NUM_THREADS=1 python -m mar_grpo.rewards.heatmap_training",
        "settings": asdict(settings),
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "seconds": round(seconds),
        "torch": torch.__version__,
        "loss": round(loss, 4),
        "accepted_of_500_right_scenes": strict_share(HeatmapJudge(arguments.out), 500, seed=settings.seed + 1),
        "sha256": hashlib.sha256(arguments.out.read_bytes()).hexdigest(),
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
