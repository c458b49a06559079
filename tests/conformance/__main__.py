"""python -m tests.conformance nova|mar|harmon|vae DIR: check every tensor of a folder of recorded vectors.

Prints a line for each group of tensors with its largest error and tolerance. Exit codes: 1 a miss or a tensor that
nothing was compared with, 2 a wrong command.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from tests.conformance.checks import Comparison

SETS = ("nova", "mar", "harmon", "vae")


def run(name: str, folder: Path) -> Comparison:
    """Check one folder with the module of that name (its `check(folder, compare)`)."""
    compare = Comparison(folder)
    if not compare.missed:  # files and manifest agree
        importlib.import_module(f"tests.conformance.{name}").check(folder, compare)
    return compare


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if not (arguments.folder / "manifest.json").is_file():
        parser.error(f"no manifest.json in {arguments.folder}")
    compare = run(arguments.set, arguments.folder)
    print("\n".join(compare.report()))
    raise SystemExit(0 if compare.ok else 1)


if __name__ == "__main__":
    main()
