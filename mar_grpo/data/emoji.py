"""The art of the emoji scenes: 16 emoji and three shapes in five colours, from the vendored Fluent Emoji Flat."""

from __future__ import annotations

import functools
import io
import json
from importlib import resources

import numpy as np

EMOJI = (
    "cat", "dog", "apple", "banana", "sun", "star", "tree", "fish",
    "house", "mushroom", "rocket", "snail", "frog", "penguin", "umbrella", "bell",
)  # fmt: skip
SHAPES = ("heart", "circle", "square")
CLASSES = EMOJI + SHAPES
COLORS = ("red", "green", "blue", "purple", "brown")
# An object that can be drawn: (class, colour); only the three shapes have a colour.
GLYPHS: tuple[tuple[str, str | None], ...] = tuple((name, None) for name in EMOJI) + tuple(
    (shape, color) for shape in SHAPES for color in COLORS
)
GLYPH_PX = 26
SUPERSAMPLE = 4


def glyphs_of(class_name: str, color: str | None = None) -> list[int]:
    """Indices into GLYPHS of every object of this class (and colour, when one is asked for)."""
    return [i for i, (name, tint) in enumerate(GLYPHS) if name == class_name and color in (None, tint)]


@functools.cache
def glyph_rgba(index: int, size_px: int = GLYPH_PX) -> np.ndarray:
    """Art of one glyph, float32 [size_px, size_px, 4] in [0, 1], colour premultiplied by alpha. Read only."""
    import resvg_py
    from PIL import Image

    name, color = GLYPHS[index]
    body = _art()["glyphs"][f"{color} {name}" if color else name]
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{body}</svg>'
    large = size_px * SUPERSAMPLE
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=large, height=large))
    rgba = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"), dtype=np.float64) / 255.0
    rgba[..., :3] *= rgba[..., 3:]
    small = rgba.reshape(size_px, SUPERSAMPLE, size_px, SUPERSAMPLE, 4).mean(axis=(1, 3)).astype(np.float32)
    small.setflags(write=False)
    return small


@functools.cache
def _art() -> dict:
    path = resources.files("mar_grpo.assets") / "fluent_emoji_flat" / "glyphs.json"
    return json.loads(path.read_text(encoding="utf-8"))
