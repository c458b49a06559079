"""The held-out judge `templates`: finds objects by matching the vendored art itself. It has no learned weights.

Picture and art are compared after the same low-pass, so that the slight blur of an autoencoder costs little. At every
place of the canvas the squared difference to every glyph on the plain background is computed (by Fourier transform).
The best places are objects if their difference is small and if no other glyph explains them nearly as well (a blend of
two does not pass). Then the scene that was found is drawn, and whatever the picture holds beyond it (half objects,
ghosts, blobs, holes) is reported as malformed.

Only evaluation and the promotion gate use this judge; a recipe that trains on it is refused (mix.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from mar_grpo.data.emoji import GLYPH_PX, GLYPHS, glyph_rgba
from mar_grpo.data.scenes import BACKGROUND, CANVAS_PX
from mar_grpo.rewards import geneval
from mar_grpo.rewards.geneval import MALFORMED, Detection, Record

NAME = "templates"
BLUR_PX = 1.0  # standard deviation of the low-pass
MARGIN_PX = 1  # the compared window is the glyph with this much plain background around it
WINDOW_PX = GLYPH_PX + 2 * MARGIN_PX
MAX_DIFFERENCE = 0.15  # squared difference over the glyph's energy; the two most alike glyphs are 0.2 apart
MAX_RATIO = 0.45  # difference to the best glyph over that to the second best; 1 for an even blend
NEARBY_PX = 2  # how far from the best place the second best glyph is looked for
SUPPRESSION_PX = 16  # objects are at least this far apart along one axis
MAX_INSIDE = (
    25.0  # grey levels, root mean square over RESIDUAL_PX x RESIDUAL_PX x RGB, an object may differ from its art
)
MAX_OUTSIDE = 15.0  # the same for the plain background
RESIDUAL_PX = 8
MAX_FOUND = 6
CHUNK = 64  # images at once: bounds memory, about 2 MB an image


class TemplateJudge:
    """Sees the objects of emoji scenes. Pictures are uint8 [B, 64, 64, 3], numpy or torch; runs on the CPU."""

    name = NAME

    def detect(self, images: np.ndarray | torch.Tensor) -> list[list[Detection]]:
        """Objects of each picture, best first; what is no proper object has the class MALFORMED.

        The score is 1 for a perfect match and 0.5 at the largest difference that is accepted.
        """
        pixels = torch.as_tensor(images)
        if pixels.ndim != 4 or pixels.shape[1:] != (CANVAS_PX, CANVAS_PX, 3) or pixels.dtype != torch.uint8:
            raise ValueError(
                f"expected uint8 [B, {CANVAS_PX}, {CANVAS_PX}, 3], got {pixels.dtype} {tuple(pixels.shape)}"
            )
        return [found for chunk in pixels.cpu().split(CHUNK) for found in _detect(chunk)]

    def strict(self, images: np.ndarray | torch.Tensor, records: Sequence[Record]) -> np.ndarray:
        """Whether each picture holds exactly what its record asks for (geneval.strict_exact), bool [B]."""
        return self.scores(images, records)["strict"] > 0

    def graded(self, images: np.ndarray | torch.Tensor, records: Sequence[Record]) -> np.ndarray:
        """How much of what is asked for is there (geneval.graded), float32 [B] in [0, 1]."""
        return self.scores(images, records)["graded"]

    def scores(self, images: np.ndarray | torch.Tensor, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Both from one look at the pictures, each float32 [B] in [0, 1].

        Raises:
            InputError: a record asks for an object this judge does not know.
        """
        geneval.check_records(records, GLYPHS, NAME)
        pairs = list(zip(records, self.detect(images), strict=True))
        strict = [geneval.strict_exact(record, found) for record, found in pairs]
        graded = [geneval.graded(record, found) for record, found in pairs]
        return {"strict": np.array(strict, dtype=np.float32), "graded": np.array(graded, dtype=np.float32)}


@torch.inference_mode()
def _detect(images: torch.Tensor) -> list[list[Detection]]:
    picture = _low_pass(images.permute(0, 3, 1, 2).float() - torch.tensor(BACKGROUND).view(3, 1, 1))
    relative, squared = _differences(picture)
    found = _objects(relative, squared)
    unexplained = picture - _draw(found)
    error = F.avg_pool2d(unexplained.square().mean(dim=1, keepdim=True), RESIDUAL_PX, stride=1)[:, 0].sqrt()
    allowed = torch.full_like(error, MAX_OUTSIDE)
    half = RESIDUAL_PX // 2
    for limit, objects in zip(allowed, found, strict=True):
        for x0, y0, x1, y1 in (thing.box for thing in objects):
            rows, columns = (slice(max(int(low) - half, 0), int(high) - half) for low, high in ((y0, y1), (x0, x1)))
            limit[rows, columns] = MAX_INSIDE
    for row, objects in zip(_peaks(error / allowed, 1.0, MAX_FOUND), found, strict=True):
        for _, y, x in row:
            corner_x, corner_y = x + half - GLYPH_PX / 2, y + half - GLYPH_PX / 2
            box = (corner_x, corner_y, corner_x + GLYPH_PX, corner_y + GLYPH_PX)
            objects.append(Detection(MALFORMED, box, 1.0))
    return found


def _differences(picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared difference to every glyph at every place where the window fits.

    Args:
        picture: low-passed picture less background, [B, 3, 64, 64].
    Returns:
        relative to the glyph's energy, and absolute; both [B, glyphs, 37, 37], indexed by the window's corner.
    """
    _, spectrum, energy = _art()
    places = CANVAS_PX - WINDOW_PX + 1
    correlation = torch.einsum("bchw,kchw->bkhw", torch.fft.rfft2(picture), spectrum)
    matched = torch.fft.irfft2(correlation, s=(CANVAS_PX, CANVAS_PX))[..., :places, :places]
    window_energy = F.avg_pool2d(picture.square().sum(dim=1, keepdim=True), WINDOW_PX, stride=1) * WINDOW_PX**2
    squared = (window_energy - 2 * matched + energy.view(1, -1, 1, 1)).clamp_min(0)
    return squared / energy.view(1, -1, 1, 1), squared


def _objects(relative: torch.Tensor, squared: torch.Tensor) -> list[list[Detection]]:
    best, glyph = relative.min(dim=1)
    found: list[list[Detection]] = []
    for image, row in enumerate(_peaks(-best, -2 * MAX_DIFFERENCE, MAX_FOUND)):
        objects = []
        for _, y, x in row:
            index = int(glyph[image, y, x])
            rows = slice(max(y - NEARBY_PX, 0), y + NEARBY_PX + 1)
            columns = slice(max(x - NEARBY_PX, 0), x + NEARBY_PX + 1)
            others = squared[image, :, rows, columns].flatten(1).min(dim=1).values
            others[index] = torch.inf
            ratio = float(squared[image, index, y, x] / others.min().clamp_min(1.0))
            score = 1.0 - float(best[image, y, x]) / (2 * MAX_DIFFERENCE)
            if score > geneval.ACCEPTED_SCORE and ratio < MAX_RATIO:
                name, color = GLYPHS[index]
                corner = (float(x + MARGIN_PX), float(y + MARGIN_PX))
                box = (*corner, corner[0] + GLYPH_PX, corner[1] + GLYPH_PX)
                objects.append(Detection(name, box, score, color))
        found.append(objects)
    return found


def _peaks(values: torch.Tensor, floor: float, most: int) -> list[list[tuple[float, int, int]]]:
    """Up to `most` highest values over `floor` of each map [B, H, W] as (value, y, x), greedily, far enough apart."""
    values = values.clone()
    count, height, width = values.shape
    ys, xs = torch.arange(height), torch.arange(width)
    found: list[list[tuple[float, int, int]]] = [[] for _ in range(count)]
    for _ in range(most):
        top, place = values.flatten(1).max(dim=1)
        if bool((top <= floor).all()):
            break
        y, x = place // width, place % width
        for image in torch.nonzero(top > floor).flatten().tolist():
            found[image].append((float(top[image]), int(y[image]), int(x[image])))
        near = (ys[None] - y[:, None]).abs().lt(SUPPRESSION_PX)[:, :, None] & (xs[None] - x[:, None]).abs().lt(
            SUPPRESSION_PX
        )[:, None, :]
        values.masked_fill_(near, -torch.inf)
    return found


def _draw(found: list[list[Detection]]) -> torch.Tensor:
    """Low-passed pictures less background of the objects found, [B, 3, 64, 64]."""
    art, _, _ = _art()
    pad = (art.shape[-1] - GLYPH_PX) // 2
    canvas = torch.zeros(len(found), 3, CANVAS_PX + 2 * pad, CANVAS_PX + 2 * pad)
    for image, objects in enumerate(found):
        for thing in objects:
            x, y = int(thing.box[0]), int(thing.box[1])
            glyph = GLYPHS.index((thing.class_name, thing.color))
            canvas[image, :, y : y + art.shape[-1], x : x + art.shape[-1]] += art[glyph]
    return canvas[..., pad:-pad, pad:-pad]


@functools.cache
def _art() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Low-passed glyphs less background [glyphs, 3, 36, 36], conjugate spectra of their windows, energies [glyphs]."""
    pad = 5
    rgba = torch.from_numpy(np.stack([glyph_rgba(index) for index in range(len(GLYPHS))])).permute(0, 3, 1, 2)
    background = torch.tensor(BACKGROUND, dtype=torch.float32).view(1, 3, 1, 1)
    art = _low_pass(F.pad(rgba[:, :3] * 255.0 - rgba[:, 3:] * background, [pad] * 4))
    inset = pad - MARGIN_PX
    windows = art[..., inset:-inset, inset:-inset]
    spectrum = torch.fft.rfft2(windows, s=(CANVAS_PX, CANVAS_PX)).conj()
    return art, spectrum, windows.square().sum(dim=(1, 2, 3))


def _low_pass(pictures: torch.Tensor) -> torch.Tensor:
    """Gaussian of BLUR_PX over the last two axes of [B, 3, H, W]; the border is continued."""
    offsets = torch.arange(-3, 4, dtype=torch.float32)
    kernel = torch.exp(-0.5 * (offsets / BLUR_PX) ** 2)
    kernel = (kernel / kernel.sum()).view(1, 1, 1, 7).expand(3, 1, 1, 7)
    padded = F.pad(pictures, [3, 3, 3, 3], mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel, groups=3), kernel.transpose(2, 3), groups=3)
