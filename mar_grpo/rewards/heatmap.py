"""The training judge `heatmap`: a small convolutional network that says at each place which object is centred there.

Places are a grid of stride 4. The network was trained (heatmap_training.py) to give the art its class, and half
objects, blends, ghosts and blobs the class MALFORMED with a share that grows with what is wrong, so its probabilities
are a graded reward. Evaluation and the promotion gate never use this judge; the held-out one is templates.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from mar_grpo.data.emoji import GLYPH_PX, GLYPHS
from mar_grpo.data.scenes import CANVAS_PX
from mar_grpo.models.build import on_meta
from mar_grpo.rewards import geneval
from mar_grpo.rewards.geneval import MALFORMED, Detection, Record

NAME = "heatmap"
STRIDE_PX = 4
PAD_PX = 2  # so that a place of the grid lies on the centre of each cell
GRID = (CANVAS_PX + 2 * PAD_PX) // STRIDE_PX
JUNK, NOTHING = len(GLYPHS), len(GLYPHS) + 1  # the classes after the glyphs
CHANNELS = len(GLYPHS) + 2
MIN_OBJECTNESS = 0.05  # a place with less is no candidate
SHARPNESS = 1.6  # on the logits: training with graded labels leaves a perfect object at 0.92, this makes it 0.98
APART = 3  # a candidate is the best place within this many places along each axis
CHUNK = 128


class HeatmapNet(nn.Module):
    """Logits of (glyphs, junk, nothing) at every place: [B, 3, 64, 64] in [-1, 1] -> [B, CHANNELS, GRID, GRID]."""

    def __init__(self, fine: int = 48, coarse: int = 80) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3 * STRIDE_PX**2, fine, 1)
        self.look = _block(fine, fine)
        self.down = _block(fine, coarse, stride=2)
        self.context = nn.ModuleList([_block(coarse, coarse) for _ in range(2)])
        self.up = nn.Conv2d(coarse, fine, 1)
        self.join = _block(fine, fine)
        self.head = nn.Conv2d(fine, CHANNELS, 1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        tiles = F.pixel_unshuffle(F.pad(pictures, [PAD_PX] * 4, mode="replicate"), STRIDE_PX)
        fine = self.look(self.stem(tiles))
        coarse = self.down(fine)
        for block in self.context:
            coarse = coarse + block(coarse)
        back = F.interpolate(self.up(coarse), size=fine.shape[-2:], mode="bilinear", align_corners=True)
        return self.head(self.join(fine + back))


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.SiLU())


def as_input(images: np.ndarray | torch.Tensor) -> torch.Tensor:
    """uint8 or float [B, 64, 64, 3] in 0..255 -> float32 [B, 3, 64, 64] in [-1, 1]."""
    return torch.as_tensor(images).permute(0, 3, 1, 2).float() / 127.5 - 1.0  # channels last in memory: faster


class HeatmapJudge:
    """Sees the objects of emoji scenes. Pictures are uint8 [B, 64, 64, 3], numpy or torch.

    Args:
        weights: safetensors file; None takes the ones in the package.
        device: where the network computes.
    """

    name = NAME

    def __init__(self, weights: Path | None = None, device: torch.device | str = "cpu") -> None:
        self.net, self.device = _load(weights, device), device

    def detect(self, images: np.ndarray | torch.Tensor) -> list[list[Detection]]:
        """Objects of each picture. A candidate without a class over ACCEPTED_SCORE is MALFORMED."""
        return [
            [_verdict(*candidate) for candidate in found if candidate[1].sum() > geneval.ACCEPTED_SCORE]
            for found in self._candidates(images)
        ]

    def strict(self, images: np.ndarray | torch.Tensor, records: Sequence[Record]) -> np.ndarray:
        """Whether each picture holds exactly what its record asks for (geneval.strict_exact), bool [B]."""
        return self.scores(images, records)["strict"] > 0

    def graded(self, images: np.ndarray | torch.Tensor, records: Sequence[Record]) -> np.ndarray:
        """How much of what is asked for is there (geneval.graded), float32 [B] in [0, 1]."""
        return self.scores(images, records)["graded"]

    def scores(self, images: np.ndarray | torch.Tensor, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Every score of this judge from one look at the pictures, each float32 [B] in [0, 1].

        `strict` and `graded` as above. `presence` is the mean probability of the objects asked for, whatever else the
        picture holds: a reward that can be cheated with clutter.

        Raises:
            InputError: a record asks for an object this judge does not know.
        """
        geneval.check_records(records, GLYPHS, NAME)
        rows = []
        for record, found in zip(records, self._candidates(images), strict=True):
            objects = [_verdict(*one) for one in found if one[1].sum() > geneval.ACCEPTED_SCORE]
            soft = [detection for one in found for detection in _shares(*one)]
            rows.append(
                (
                    geneval.strict_exact(record, objects),
                    geneval.graded(record, soft),
                    geneval.presence(record, geneval.claim(record, soft)),
                )
            )
        table = np.array(rows, dtype=np.float32).reshape(-1, 3)
        return dict(zip(("strict", "graded", "presence"), table.T.copy(), strict=True))

    @torch.inference_mode()
    def _candidates(self, images: np.ndarray | torch.Tensor) -> list[list[tuple[geneval.Box, np.ndarray]]]:
        """Places where something is centred: (box, probability of every glyph and of junk, [CHANNELS - 1])."""
        pixels = torch.as_tensor(images)
        if pixels.ndim != 4 or pixels.shape[1:] != (CANVAS_PX, CANVAS_PX, 3) or pixels.dtype != torch.uint8:
            raise ValueError(
                f"expected uint8 [B, {CANVAS_PX}, {CANVAS_PX}, 3], got {pixels.dtype} {tuple(pixels.shape)}"
            )
        found: list[list[tuple[geneval.Box, np.ndarray]]] = [[] for _ in range(len(pixels))]
        for start in range(0, len(pixels), CHUNK):
            logits = SHARPNESS * self.net(as_input(pixels[start : start + CHUNK].to(self.device)))
            margin = logits[:, :NOTHING].logsumexp(dim=1) - logits[:, NOTHING]
            best = F.max_pool2d(margin, 2 * APART + 1, stride=1, padding=APART)
            places = torch.nonzero((margin == best) & (margin.sigmoid() > MIN_OBJECTNESS))
            image, y, x = places.unbind(1)
            shares = logits[image, :, y, x].softmax(dim=1)[:, :NOTHING].cpu().numpy()
            for (row, *centre), share in zip(places.tolist(), shares, strict=True):
                y0, x0 = (place * STRIDE_PX + STRIDE_PX / 2 - PAD_PX - GLYPH_PX / 2 for place in centre)
                found[start + row].append(((x0, y0, x0 + GLYPH_PX, y0 + GLYPH_PX), share))
        return found


def _verdict(box: geneval.Box, share: np.ndarray) -> Detection:
    glyph = int(share[:JUNK].argmax())
    if share[glyph] > geneval.ACCEPTED_SCORE:
        name, color = GLYPHS[glyph]
        return Detection(name, box, float(share[glyph]), color)
    return Detection(MALFORMED, box, float(share.sum()))


def _shares(box: geneval.Box, share: np.ndarray) -> list[Detection]:
    """The most likely object with its probability, and the rest of what is there as malformed."""
    glyph = int(share[:JUNK].argmax())
    name, color = GLYPHS[glyph]
    rest = float(share.sum() - share[glyph])
    return [Detection(name, box, float(share[glyph]), color), Detection(MALFORMED, box, rest)]


@functools.cache
def _load(weights: Path | None, device: torch.device | str) -> HeatmapNet:
    net = on_meta(HeatmapNet)
    path = weights or Path(str(resources.files("mar_grpo.assets") / "judges" / "heatmap.safetensors"))
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    net.load_state_dict(tensors, assign=True)
    return net.to(device=device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore[call-overload]


def training_facts() -> dict:
    """How the weights in the package were made: seed, updates, seconds, accuracy, digest."""
    path = resources.files("mar_grpo.assets") / "judges" / "heatmap.json"
    return json.loads(path.read_text(encoding="utf-8"))
