"""The picture of the README: held-out prompts before and after training, from the same noise.

    python -m tests.benchmarks.before_after --run file:///FOLDER/runs/NAME --out docs/before_after.png

Prompts are those of the report page, chosen by a hash: nothing is chosen by its looks. A green frame: right, says the
held-out judge.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mar_grpo.documents import DocumentRef, ScoreTable, read_document, read_rows
from mar_grpo.evaluation.benchmarks import load_images
from mar_grpo.evaluation.report import shown_prompts
from mar_grpo.runs import Run

SCALE, GAP, TEXT_PX = 2, 6, 28
PAPER, INK, RIGHT, WRONG = (255, 255, 255), (40, 44, 52), (22, 128, 61), (200, 200, 205)


def draw(run: Run, per_tag: int, columns: int) -> Image.Image:
    """A block a prompt: caption, the pictures before, the pictures after; right ones (held-out judge) are framed."""
    records = dict(run.records())
    tables = [
        read_document(DocumentRef.model_validate(records[f"benchmark_{label}"]["outputs"]["score_table"]), ScoreTable)
        for label in ("before", "after")
    ]
    rows = [{(row.prompt_id, row.sample): row for row in read_rows(table)} for table in tables]
    chosen = [prompt for some in shown_prompts(list(rows[0].values()), per_tag).values() for prompt in some]
    samples = 1 + max(sample for _, sample in rows[0])
    images = [
        load_images(table, [row for (prompt, _), row in some.items() if prompt in chosen])
        for table, some in zip(tables, rows, strict=True)
    ]
    side = next(iter(images[0].values())).shape[0] * SCALE
    block = (samples * (side + GAP), TEXT_PX + 2 * (side + GAP))
    lines = -(-len(chosen) // columns)
    sheet = Image.new("RGB", (columns * (block[0] + 3 * GAP), lines * (block[1] + 2 * GAP)), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, prompt in enumerate(chosen):
        x, y = (number % columns) * (block[0] + 3 * GAP) + GAP, (number // columns) * (block[1] + 2 * GAP)
        pen.text((x, y + 8), rows[0][prompt, 0].prompt.removeprefix("a photo of "), fill=INK, font=font)
        for line, (some, pictures) in enumerate(zip(rows, images, strict=True)):
            for sample in range(samples):
                left, top = x + sample * (side + GAP), y + TEXT_PX + line * (side + GAP)
                picture = Image.fromarray(pictures[prompt, sample]).resize((side, side), Image.Resampling.NEAREST)
                sheet.paste(picture, (left, top))
                right = some[prompt, sample].scores["templates/strict"] > 0
                frame = (left - 2, top - 2, left + side + 1, top + side + 1)
                pen.rectangle(frame, outline=RIGHT if right else WRONG, width=2)
    return sheet


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="URI of a finished run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-tag", type=int, default=6)
    parser.add_argument("--columns", type=int, default=6)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(Run.open(arguments.run), arguments.per_tag, arguments.columns).save(arguments.out, optimize=True)
