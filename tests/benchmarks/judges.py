"""How often each judge is right about real held-out scenes and about the same scenes with one thing wrong.

    python -m tests.benchmarks.judges [--scenes 1000] [--seed 0]

A right scene shows what a held-out record asks for: a judge must accept it. A wrong one is that scene after one change
that makes it wrong: a judge must refuse it. Both are judged as drawn, with the blur and noise of a small autoencoder
put on, and after the autoencoder of the shipped checkpoint. The autoencoder redraws some blends and halves as whole
objects, so a picture that counts as wrong there may have become right: read those refusals as a lower bound.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from mar_grpo.data import scenes
from mar_grpo.data.emoji import COLORS, GLYPHS, glyphs_of
from mar_grpo.data.scenes import CELL_PX, TAGS, Record, Scene
from mar_grpo.rewards.heatmap import HeatmapJudge
from mar_grpo.rewards.templates import TemplateJudge

WRONG = ("removed", "swapped", "recoloured", "mirrored", "extra", "half erased", "half swapped", "blended", "ghost")


def held_out_scenes(count: int, rng: np.random.Generator) -> tuple[list[Record], list[Scene]]:
    """Records of the held-out split, equally many a tag, each with a scene that shows it."""
    by_tag = [[r for r in scenes.compositions("held_out") if r["tag"] == tag] for tag in TAGS]
    records = [by_tag[i % len(TAGS)][int(rng.integers(len(by_tag[i % len(TAGS)])))] for i in range(count)]
    return records, [scenes.scene_for(record, rng) for record in records]


def spoil(record: Record, scene: Scene, kind: str, rng: np.random.Generator) -> np.ndarray | None:
    """A picture of the scene with one thing wrong, uint8 [64, 64, 3]; None where this cannot be done to this record."""
    place = int(rng.integers(len(scene)))
    glyph, cell = scene[place]
    asked = {g for entry in record["include"] for g in glyphs_of(entry["class"])}
    other = int(rng.choice([g for g in range(len(GLYPHS)) if g not in asked]))
    empty = [c for c in range(scenes.CELLS) if c not in {c for _, c in scene}]

    def with_glyph(new: int) -> Scene:
        return tuple((new, c) if i == place else (g, c) for i, (g, c) in enumerate(scene))

    if kind == "removed":
        return scenes.render(scene[:place] + scene[place + 1 :])
    if kind == "swapped":
        return scenes.render(with_glyph(other))
    if kind == "recoloured":
        if not any(entry.get("color") for entry in record["include"]):
            return None
        name, color = GLYPHS[glyph]
        return scenes.render(with_glyph(glyphs_of(name, str(rng.choice([c for c in COLORS if c != color])))[0]))
    if kind == "mirrored":
        position = record["include"][-1].get("position")
        if not position:
            return None
        flip = 1 if position[0] in ("left of", "right of") else 2
        return scenes.render(tuple((g, c ^ flip) for g, c in scene))
    if kind in ("extra", "ghost"):
        if not empty:
            return None
        picture = scenes.render((*scene, (int(rng.integers(len(GLYPHS))), int(rng.choice(empty)))))
        strength = 1.0 if kind == "extra" else rng.uniform(0.35, 0.8)
        return _mix(scenes.render(scene), picture, strength)
    rows, columns = (slice(p * CELL_PX, (p + 1) * CELL_PX) for p in divmod(cell, 2))
    picture = scenes.render(scene)
    new = np.full_like(picture, scenes.BACKGROUND) if kind == "half erased" else scenes.render(with_glyph(other))
    if kind == "blended":
        return _mix(picture, new, rng.uniform(0.35, 0.65))
    half = CELL_PX // 2
    part = [(slice(half), slice(None)), (slice(half, None), slice(None)), (slice(None), slice(half))]
    chosen = [*part, (slice(None), slice(half, None))][int(rng.integers(4))]
    picture[rows, columns][chosen] = new[rows, columns][chosen]
    return picture


def _mix(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    return np.round((1 - share) * first + share * second).astype(np.uint8)


def degrade(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blur up to 0.8 px, noise up to 6 grey levels, smooth noise and a tint up to 4 each, uint8 [B, 64, 64, 3]."""
    out = np.empty_like(images)
    for i, image in enumerate(images):
        picture = _blur(image.astype(np.float64), rng.uniform(0.05, 0.8))
        picture += rng.normal(size=image.shape) * rng.uniform(0, 6)
        smooth = _blur(rng.normal(size=image.shape), 2.0)
        picture += smooth / smooth.std() * rng.uniform(0, 4) + rng.uniform(-4, 4, size=3)
        out[i] = np.clip(np.round(picture), 0, 255).astype(np.uint8)
    return out


def _blur(picture: np.ndarray, sigma_px: float) -> np.ndarray:
    offsets = np.arange(len(picture))
    weights = np.exp(-0.5 * ((offsets[:, None] - offsets) / sigma_px) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("yi,xj,ijc->yxc", weights, weights, picture, optimize=True)


def wrong_pictures(records: list[Record], shown: list[Scene], rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
    """One spoiled picture of each scene, uint8 [B, 64, 64, 3], and what is wrong with it; kinds drawn evenly."""
    pictures, kinds = [], []
    for record, scene in zip(records, shown, strict=True):
        picture = None
        while picture is None:
            kind = str(rng.choice(WRONG))
            picture = spoil(record, scene, kind, rng)
        pictures.append(picture)
        kinds.append(kind)
    return np.stack(pictures), kinds


def _row(name: str, right: np.ndarray, refused: np.ndarray) -> str:
    cells = [_share(values) for values in (right, refused, np.concatenate([right, refused])) if len(values)]
    return f"  {name:<14}" + "".join(f"{cell:>24}" for cell in cells)


def _share(right: np.ndarray) -> str:
    """Percentage with standard error and n."""
    mean = right.mean()
    return f"{100 * mean:.1f} +- {100 * np.sqrt(mean * (1 - mean) / len(right)):.1f} (n={len(right)})"


def _table(judge: TemplateJudge | HeatmapJudge, cases: tuple[list[Record], np.ndarray, np.ndarray, list[str]]) -> None:
    records, right_pictures, spoiled, kinds = cases
    started = time.perf_counter()
    accepted = judge.strict(right_pictures, records)
    milliseconds = 1e3 * (time.perf_counter() - started) / len(records)
    refused = ~judge.strict(spoiled, records)
    print(f"  {'tag':<14}{'right accepted, %':>24}{'wrong refused, %':>24}{'both, %':>24}")
    tags = np.array([record["tag"] for record in records])
    for tag in TAGS:
        print(_row(tag, accepted[tags == tag], refused[tags == tag]))
    print(_row("all", accepted, refused) + f"   {milliseconds:.1f} ms a picture")
    of_kind = np.array(kinds)
    print("  refused by kind: " + "; ".join(f"{kind} {_share(refused[of_kind == kind])}" for kind in WRONG))


def main() -> None:
    """Prints the tables of both judges."""
    from mar_grpo.models.checkpoint import load_policy  # here, so that tests need not wait for transformers

    parser = argparse.ArgumentParser(description="Accuracy of both judges on held-out scenes.")
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path(str(resources.files("mar_grpo.assets") / "emoji-nova")))
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    records, shown = held_out_scenes(arguments.scenes, rng)
    right_pictures = scenes.render_batch(shown)
    spoiled, kinds = wrong_pictures(records, shown, rng)
    vae = load_policy(arguments.checkpoint).vae

    def autoencoded(pictures: np.ndarray) -> np.ndarray:
        chunks = torch.from_numpy(pictures).split(64)
        with torch.inference_mode():
            return torch.cat([vae.decode(vae.encode(chunk)) for chunk in chunks]).numpy()

    looks: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "as drawn": lambda pictures: pictures,
        "blur and noise": lambda pictures: degrade(pictures, np.random.default_rng(arguments.seed + 1)),
        "autoencoded": autoencoded,
    }
    print(f"{arguments.scenes} held-out scenes, each right and with one thing wrong; seed {arguments.seed}")
    for look, change in looks.items():
        cases = (records, change(right_pictures), change(spoiled), kinds)
        for judge in (TemplateJudge(), HeatmapJudge()):
            print(f"\n{judge.name}, pictures {look}")
            _table(judge, cases)


if __name__ == "__main__":
    main()
