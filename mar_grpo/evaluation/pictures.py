"""Pictures as files: PNG bytes, data URIs for a page, contact sheets."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """uint8 [H, W, 3] -> PNG; the same picture always gives the same bytes."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def data_uri(image: NDArray[np.uint8], largest: int = 256) -> str:
    """The picture as a PNG data URI, its longer side at most `largest` px."""
    picture = Image.fromarray(image)
    if max(picture.size) > largest:
        scale = largest / max(picture.size)
        picture = picture.resize(
            (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS
        )
    return "data:image/png;base64," + base64.b64encode(png_bytes(np.asarray(picture))).decode()


def contact_sheet(images: NDArray[np.uint8], columns: int, gap: int = 4) -> NDArray[np.uint8]:
    """Pictures [B, H, W, 3] row by row on white, `columns` wide with `gap` px around each: uint8 [rows, width, 3]."""
    count, height, width, _ = images.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 255, np.uint8)
    for index, image in enumerate(images):
        top, left = gap + index // columns * (height + gap), gap + index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image
    return sheet
