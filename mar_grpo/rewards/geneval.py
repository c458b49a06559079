"""GenEval's rules over detections: what a list of detected objects says about a prompt record.

Rules of djghosh13/geneval (`official`), of the strict/partial server used by Flow-GRPO (`server`), the latter with its
two defects repaired (`partial_fixed`), and two of ours for judges that see every object of a picture: `strict_exact`
(nothing missing, nothing too much) and `graded` (the same facts as a number in [0, 1]).

A record is GenEval's: {"tag", "include": [{"class", "count", "color"?, "position"?: [relation, index]}], "exclude"?}.
Boxes are (x0, y0, x1, y1) in pixels, y grows downwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mar_grpo.errors import InputError

Record = Mapping[str, Any]
Box = tuple[float, float, float, float]

MALFORMED = "malformed"  # class of a detection that says: something is here, and it is no proper object
SCORE_THRESHOLD = 0.3
COUNTING_THRESHOLD = 0.9
MAX_OBJECTS = 16
POSITION_MARGIN = 0.1
ACCEPTED_SCORE = 0.5  # a detection of our own judges counts as an object above this
EXTRA_WEIGHT = 0.5
RELATION_WEIGHT = 0.4


@dataclass(frozen=True, slots=True)
class Detection:
    """One detected object: class, colour (None: not asked or has none), box in pixels, score in [0, 1]."""

    class_name: str
    box: Box
    score: float
    color: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says: correct or not, the partial score (1 or 0 for `official`), and why not."""

    correct: bool
    score: float
    reasons: tuple[str, ...]


# --- geometry ----------------------------------------------------------------------------------------------------


def relations(box: Box, other: Box) -> set[str]:
    """Relations of `box` with respect to `other`: a subset of left of / right of / above / below, possibly two."""
    offsets = [(box[i] + box[i + 2] - other[i] - other[i + 2]) / 2 for i in (0, 1)]
    margins = [POSITION_MARGIN * (box[i + 2] - box[i] + other[i + 2] - other[i]) for i in (0, 1)]
    shrunk = [
        math.copysign(max(abs(offset) - margin, 0.0), offset) for offset, margin in zip(offsets, margins, strict=True)
    ]
    if max(map(abs, shrunk)) < 1e-3:
        return set()
    x, y = (part / math.hypot(*offsets) for part in shrunk)
    holding = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {relation for relation, holds in holding.items() if holds}


def iou(box: Box, other: Box) -> float:
    """Intersection over union with GenEval's convention: a side is x1 - x0 + 1 pixels, never negative."""

    def area(x0: float, y0: float, x1: float, y1: float) -> float:
        return max(x1 - x0 + 1, 0.0) * max(y1 - y0 + 1, 0.0)

    shared = area(max(box[0], other[0]), max(box[1], other[1]), min(box[2], other[2]), min(box[3], other[3]))
    union = area(*box) + area(*other) - shared
    return shared / union if union else 0.0


def keep_detections(detections: Iterable[Detection], tag: str, max_overlap: float = 1.0) -> dict[str, list[Detection]]:
    """Per class the detections GenEval looks at, best first: over the tag's threshold, at most 16, then greedy NMS.

    Args:
        max_overlap: a detection is dropped when its IoU with a better one reaches this; 1.0 means no NMS.
    """
    threshold = np.float32(COUNTING_THRESHOLD if tag == "counting" else SCORE_THRESHOLD)
    by_class: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        if np.float32(detection.score) > threshold:
            by_class.setdefault(detection.class_name, []).append(detection)
    for name, found in by_class.items():
        kept: list[Detection] = []
        for detection in found[:MAX_OBJECTS]:
            if max_overlap == 1.0 or all(iou(detection.box, better.box) < max_overlap for better in kept):
                kept.append(detection)
        by_class[name] = kept
    return by_class


# --- GenEval's own rules -----------------------------------------------------------------------------------------


def official(record: Record, detections: Iterable[Detection], max_overlap: float = 1.0) -> Verdict:
    """The published verdict: at least `count` of each entry, colours and relations of the best ones, `exclude`."""
    objects = keep_detections(detections, record["tag"], max_overlap)
    _, reasons = _walk(record, objects, exact=False, fixed=False)
    for entry in record.get("exclude", ()):
        found = len(objects.get(entry["class"], ()))
        if found >= entry["count"]:
            reasons.append(f"expected {entry['class']}<{entry['count']}, found {found}")
    return Verdict(not reasons, float(not reasons), tuple(reasons))


def server(record: Record, detections: Iterable[Detection]) -> Verdict:
    """Strict verdict (== count, `exclude` ignored) and partial score as the public reward server gives them.

    The score may be negative, and a wrong relation counts as a 0 and a 1: use `partial_fixed` for training.
    """
    scores, reasons = _walk(record, keep_detections(detections, record["tag"]), exact=True, fixed=False)
    return Verdict(not reasons, sum(scores) / max(len(scores), 1), tuple(reasons))


def partial_fixed(record: Record, detections: Iterable[Detection]) -> float:
    """The server's partial score without its defects: counts clipped at 0, one entry a colour, one a relation."""
    scores, _ = _walk(record, keep_detections(detections, record["tag"]), exact=True, fixed=True)
    return sum(scores) / max(len(scores), 1)


def _walk(
    record: Record, objects: Mapping[str, list[Detection]], *, exact: bool, fixed: bool
) -> tuple[list[float], list[str]]:
    scores: list[float] = []
    reasons: list[str] = []
    matched: list[list[Detection] | None] = []
    for entry in record.get("include", ()):
        name, count = entry["class"], entry["count"]
        color, position = entry.get("color"), entry.get("position")
        found = objects.get(name, []) if exact else objects.get(name, [])[:count]
        share = 1.0 - abs(len(found) - count) / count
        scores.append(max(share, 0.0) if fixed else share)
        if len(found) != count:
            reasons.append(f"expected {name}{'==' if exact else '>='}{count}, found {len(found)}")
            scores += [0.0] * ((color is not None) + (position is not None))
            matched.append(None)
            continue
        right = True
        if color is not None:
            colors = Counter(detection.color for detection in found)
            scores.append(colors[color] / count)
            right = colors[color] == count
            if not right:
                listed = ", ".join(f"{n} {c}" for c, n in colors.items())
                reasons.append(f"expected {color} {name}>={count}, found {colors[color]} {color}; and {listed}")
        if position is not None and right:
            wrong = _wrong_relation(name, found, position[0], matched[position[1]])
            right = wrong is None
            scores.append(float(right))
            if wrong is not None:
                reasons.append(wrong)
                if not fixed and matched[position[1]] is not None:
                    scores.append(1.0)  # the server's defect
        elif position is not None and fixed:
            scores.append(0.0)
        matched.append(found if right else None)
    return scores, reasons


def _wrong_relation(
    name: str, found: Sequence[Detection], relation: str, targets: Sequence[Detection] | None
) -> str | None:
    if targets is None:
        return f"no target for {name} to be {relation}"
    for subject in found:
        for target in targets:
            holding = relations(subject.box, target.box)
            if relation not in holding:
                return f"expected {name} {relation} target, found {' and '.join(sorted(holding))} target"
    return None


# --- rules for judges that see every object ----------------------------------------------------------------------


def strict_exact(record: Record, detections: Iterable[Detection]) -> bool:
    """Whether the picture holds exactly what is asked for: counts, colours, relations, nothing else, nothing malformed.

    Detections below ACCEPTED_SCORE are not objects.
    """
    objects = [detection for detection in detections if detection.score > ACCEPTED_SCORE]
    claimed, rest = _claim(record, objects)
    entries = record.get("include", ())
    if rest or any(len(group) != entry["count"] for group, entry in zip(claimed, entries, strict=True)):
        return False
    return all(
        _wrong_relation(entry["class"], group, entry["position"][0], claimed[entry["position"][1]]) is None
        for group, entry in zip(claimed, entries, strict=True)
        if entry.get("position")
    )


def graded(record: Record, detections: Iterable[Detection]) -> float:
    """How much of what is asked for is there, in [0, 1]; detections of any score count with their score.

    presence = mean score of the objects asked for (a missing one scores 0). With relations,
    0.6 presence + 0.4 (lowest score of the objects asked for) (mean soft relation in [0, 1]).
    Divided by 1 + 0.5 x the summed scores of everything else in the picture, malformed objects included.
    """
    claimed, rest = _claim(record, detections)
    entries = record.get("include", ())
    value = presence(record, claimed)
    soft = [
        _soft_relation(subject.box, target.box, entry["position"][0])
        for entry, group in zip(entries, claimed, strict=True)
        if entry.get("position")
        for subject in group
        for target in claimed[entry["position"][1]]
    ]
    if any(entry.get("position") for entry in entries):
        complete = all(len(group) == entry["count"] for group, entry in zip(claimed, entries, strict=True))
        lowest = min((d.score for group in claimed for d in group), default=0.0) if complete else 0.0
        value = (1 - RELATION_WEIGHT) * value + RELATION_WEIGHT * lowest * (sum(soft) / max(len(soft), 1))
    return value / (1.0 + EXTRA_WEIGHT * sum(detection.score for detection in rest))


def presence(record: Record, claimed: Sequence[Sequence[Detection]]) -> float:
    """Mean score of the objects asked for, whatever else is in the picture; 1 when nothing is asked for."""
    wanted = sum(entry["count"] for entry in record.get("include", ()))
    return sum(d.score for group in claimed for d in group) / wanted if wanted else 1.0


def claim(record: Record, detections: Iterable[Detection]) -> list[list[Detection]]:
    """The detections that answer each include entry, best first, at most `count` each, none twice."""
    return _claim(record, detections)[0]


def _claim(record: Record, detections: Iterable[Detection]) -> tuple[list[list[Detection]], list[Detection]]:
    rest = sorted(detections, key=lambda d: -d.score)
    entries = list(record.get("include", ()))
    claimed: list[list[Detection]] = [[] for _ in entries]
    for index in sorted(range(len(entries)), key=lambda i: entries[i].get("color") is None):  # the choosy ones first
        entry = entries[index]
        group = [d for d in rest if d.class_name == entry["class"] and entry.get("color") in (None, d.color)]
        claimed[index] = group[: entry["count"]]
        taken = {id(detection) for detection in claimed[index]}
        rest = [detection for detection in rest if id(detection) not in taken]
    return claimed, rest


def _soft_relation(box: Box, other: Box, relation: str) -> float:
    """Sigmoid of the signed offset along the relation's axis, in units of an eighth of the mean side."""
    axis = 0 if relation in ("left of", "right of") else 1
    offset = (box[axis] + box[axis + 2] - other[axis] - other[axis + 2]) / 2
    side = (box[axis + 2] - box[axis] + other[axis + 2] - other[axis]) / 2
    sign = 1.0 if relation in ("right of", "below") else -1.0
    return 1.0 / (1.0 + math.exp(-min(max(sign * offset / max(side / 8, 1e-6), -30.0), 30.0)))


def check_records(records: Iterable[Record], known: Collection[tuple[str, str | None]], judge: str) -> None:
    """Refuses records that ask for objects a judge cannot see.

    Args:
        known: (class, colour) of every object the judge knows.
    Raises:
        InputError: names the judge, the object and the prompt.
    """
    names = {name for name, _ in known}
    for record in records:
        for entry in record.get("include", ()):
            color = entry.get("color")
            if entry["class"] not in names or (color is not None and (entry["class"], color) not in known):
                wanted = f"{color} {entry['class']}" if color else entry["class"]
                raise InputError(
                    f"the judge {judge!r} does not know {wanted!r}",
                    where=f"prompt {record.get('prompt', '')!r}",
                    hint="choose prompts of the emoji scenes, or a scorer that knows these objects",
                )
