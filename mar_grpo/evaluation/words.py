"""Numbers and names as a reader wants them, the same on a page, in a table and in a gate's decision."""

from __future__ import annotations

from mar_grpo.data.prompts import GENEVAL_TAGS

NARROW = "\u202f"  # a narrow space that does not break
MINUS = "\u2212"


def percent(share: float) -> str:
    """0.4716 -> 47.2 %."""
    return f"{100 * share:.1f}{NARROW}%"


def points(value: float, sign: bool = True) -> str:
    """A difference of shares in percentage points: 0.0861 -> +8.6."""
    return signed(100 * value, 1) if sign else f"{100 * value:.1f}"


def signed(value: float, decimals: int = 3) -> str:
    """With a sign, and no sign on zero."""
    text = f"{abs(value):.{decimals}f}"
    return text if float(text) == 0 else ("+" if value > 0 else MINUS) + text


def number(value: float) -> str:
    """Three decimals."""
    return f"{value:.3f}".replace("-", MINUS)


def duration(seconds: float) -> str:
    """75.3 -> 1 min 15 s."""
    if seconds < 10:
        return f"{seconds:.1f}{NARROW}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}{NARROW}h {minutes:02d}{NARROW}min"
    return f"{minutes}{NARROW}min {rest:02d}{NARROW}s" if minutes else f"{rest}{NARROW}s"


def tag_order(tag: str) -> tuple[int, str]:
    """GenEval's kinds in GenEval's order, then any other by name."""
    return (GENEVAL_TAGS.index(tag) if tag in GENEVAL_TAGS else len(GENEVAL_TAGS), tag)


def kind_title(tag: str) -> str:
    """GenEval's name of a kind of prompt as words: two_object -> Two objects."""
    names = {
        "single_object": "Single object",
        "two_object": "Two objects",
        "color_attr": "Colour attribution",
        "colors": "Colours",
    }
    return names.get(tag, tag.replace("_", " ").capitalize())


def step_title(name: str) -> str:
    """grpo_training -> GRPO training."""
    words = [word.upper() if word in ("sft", "grpo") else word for word in name.split("_")]
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]])
