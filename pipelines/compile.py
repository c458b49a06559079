"""Compile components and pipelines to YAML and write their READMEs: `python -m mar_grpo.pipelines.compile [FOLDER]`.

The files are committed, so that platform teams can use them by URL; a test compiles anew and compares.
"""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import yaml
from docstring_parser import parse
from kfp import compiler

ROOTS = {"components": Path(__file__).parent.parent / "components", "pipelines": Path(__file__).parent}


def assets() -> list[tuple[str, str]]:
    """(kind, name) of every component and pipeline, sorted."""
    return sorted((kind, found.parent.name) for kind, root in ROOTS.items() for found in root.glob("*/metadata.yaml"))


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the compiled YAML and the README of one asset into a folder."""
    asset = getattr(importlib.import_module(f"mar_grpo.{kind}.{name}"), name)
    stem = kind.removesuffix("s")
    compiled, readme = folder / f"{stem}.yaml", folder / "README.md"
    folder.mkdir(parents=True, exist_ok=True)
    compiler.Compiler().compile(asset, str(compiled))
    metadata = yaml.safe_load((ROOTS[kind] / name / "metadata.yaml").read_text())
    readme.write_text(_readme(asset, stem, name, metadata))
    return [compiled, readme]


def _readme(asset: Any, stem: str, name: str, metadata: dict[str, Any]) -> str:
    function = asset.pipeline_func if stem == "pipeline" else asset.python_func
    text = parse(inspect.getdoc(function) or "")
    specification = asset.component_spec
    described = {parameter.arg_name: parameter.description or "" for parameter in text.params}
    lines = [f"# {name}", "", f"<!-- Made by `make compile` from {stem}.py and metadata.yaml. -->", ""]
    lines += [text.short_description or "", ""]
    for title, fields in (("Inputs", specification.inputs), ("Outputs", specification.outputs)):
        if fields:
            lines += [f"## {title}", "", "| name | type | what |", "| --- | --- | --- |"]
            for field, spec in fields.items():
                what = described.get(field) or (text.returns.description if text.returns else "") or ""
                lines.append(f"| `{field}` | {_type(spec.type)} | {' '.join(what.split())} |")
            lines.append("")
    needs = [*metadata["dependencies"]["kubeflow"], *metadata["dependencies"].get("external_services", [])]
    lines += ["## About", "", f"- Stability: {metadata['stability']}"]
    lines += ["- Needs: " + ", ".join(f"{need['name']} {need['version']}" for need in needs)]
    lines += [f"- Tags: {', '.join(metadata['tags'])}", f"- Last verified: {metadata['lastVerified']:%Y-%m-%d}"]
    lines += [f"- Compiled: [{stem}.yaml]({stem}.yaml)", ""]
    return "\n".join(lines)


def _type(name: str) -> str:
    return name.removeprefix("system.").split("@")[0]


def main(target: Path | None = None) -> None:
    """Write everything, in place or below `target`."""
    for kind, name in assets():
        folder = target / kind / name if target else ROOTS[kind] / name
        for path in write(kind, name, folder):
            print(path)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
