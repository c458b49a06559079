"""A folder of recorded tensors, what was compared with them, and what was not.

A folder holds `manifest.json` and safetensors files. A tensor's name is "FILE.KEY", or "KEY" alone for those of
`vectors.safetensors`; weights (`weights.safetensors`, `diffusion_pytorch_model.safetensors`) are "weights.KEY". A check
passes when every comparison is within its tolerance and every tensor was compared or used as an input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS = ("weights", "diffusion_pytorch_model")
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)  # stored so to save space; every value is exact


@dataclass
class _Result:
    """One comparison: the largest error, and how far into its tolerance it is (above 1 is a miss)."""

    name: str
    tolerance: str
    error: float
    used: float
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.used <= 1.0


class Comparison:
    """The tensors of a folder, each to be compared or used.

    Args:
        folder: with `manifest.json` and `*.safetensors`.

    Attributes:
        manifest: the content of manifest.json.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self._tensors: dict[str, Tensor] = {}
        self._inputs: set[str] = set()
        self._results: list[_Result] = []
        for path in sorted(folder.glob("*.safetensors")):
            prefix = "weights." if path.stem in WEIGHTS else "" if path.stem == "vectors" else f"{path.stem}."
            for key, tensor in load_file(path).items():
                self._tensors[prefix + key] = tensor.float() if tensor.dtype in NARROW else tensor
        for name, shape in _declared(self.manifest).items():
            found = list(self._tensors[name].shape) if name in self._tensors else "missing"
            if found != shape:
                self._miss(name, f"is {found}, the manifest says {shape}")

    def __contains__(self, name: str) -> bool:
        """Whether the folder holds a tensor of this name."""
        return name in self._tensors

    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of the folder's tensors that start with `prefix`."""
        return sorted(name for name in self._tensors if name.startswith(prefix))

    def golden(self, name: str) -> Tensor:
        """A recorded tensor, narrow storage widened to float32; the caller gets its own copy. KeyError: no such one."""
        return self._tensors[name].clone()

    def input(self, name: str) -> Tensor:
        """As `golden`; the tensor counts as used."""
        self._inputs.add(name)
        return self.golden(name)

    def weights(self) -> dict[str, Tensor]:
        """All weights under their published keys, float32, counted as used; they must then be loaded strictly."""
        return {name.removeprefix("weights."): self.input(name) for name in self.names("weights.")}

    def load(self, module: nn.Module, prefix: str = "") -> None:
        """Give `module` the weights stored as `prefix` + its own key; weights it has no place for stay unchecked."""
        stored = {key: f"weights.{prefix}{key}" for key in module.state_dict()}
        for name in set(stored.values()) - self._tensors.keys():
            self._miss(name, "is in the model, not in the folder")
        found = {key: self.input(name) for key, name in stored.items() if name in self._tensors}
        module.load_state_dict(found, strict=False)

    def equal(
        self, name: str, value: Tensor, *, atol: float | Tensor = 0.0, rtol: float = 0.0, of_max: float = 0.0
    ) -> None:
        """Compare with a recorded tensor: |error| <= atol + rtol |golden| + of_max max|golden|; all zero means exact.

        May be called more than once for a tensor (two ways to the same value). A tensor `atol` is one per element.
        """
        self.same(name, value, self._tensors[name], atol=atol, rtol=rtol, of_max=of_max)

    def same(
        self,
        name: str,
        value: Tensor | float | Sequence[Any],
        expected: Tensor | float | Sequence[Any],
        *,
        atol: float | Tensor = 0.0,
        rtol: float = 0.0,
        of_max: float = 0.0,
    ) -> None:
        """As `equal`, with an expectation from elsewhere (a number in the manifest); `name` is only for the report."""
        found, golden = (torch.as_tensor(part).detach().double() for part in (value, expected))
        if found.shape != golden.shape:
            self._miss(name, f"is {list(found.shape)}, recorded is {list(golden.shape)}")
            return
        bound = torch.as_tensor(atol, dtype=torch.float64)
        parts = (("atol", bound.max().item()), ("rtol", rtol), ("of max", of_max))
        tolerance = ", ".join(f"{text} {number:.0e}" for text, number in parts if number) or "exact"
        error = (found - golden).abs().nan_to_num(nan=torch.inf)
        if not golden.numel():
            self._results.append(_Result(name, tolerance, 0.0, 0.0))
            return
        allowed = bound + rtol * golden.abs() + of_max * golden.abs().max()
        used = torch.where(error == 0, error, error / allowed)  # x/0 is infinite
        worst = int(used.flatten().argmax())
        place = [int(i) for i in torch.unravel_index(torch.tensor(worst), golden.shape)]
        why = f"at {place} is {found.flatten()[worst].item():.9g}, recorded is {golden.flatten()[worst].item():.9g}"
        self._results.append(_Result(name, tolerance, error.max().item(), used.flatten()[worst].item(), why))

    def unchecked(self) -> list[str]:
        """Names of tensors that were neither compared nor used as an input."""
        return sorted(self._tensors.keys() - self._inputs - {result.name for result in self._results})

    @property
    def missed(self) -> bool:
        """Something is not within its tolerance, or not of the shape that the manifest says."""
        return not all(result.ok for result in self._results)

    @property
    def ok(self) -> bool:
        """Nothing is missed and every tensor was compared or used."""
        return not self.missed and not self.unchecked()

    def report(self) -> list[str]:
        """A line for each group (first part of the name, tolerance), then one for each miss and unchecked tensor."""
        groups: dict[tuple[str, str], list[_Result]] = {}
        for result in self._results:
            groups.setdefault((result.name.split(".")[0], result.tolerance), []).append(result)
        lines = []
        for (prefix, tolerance), results in sorted(groups.items()):
            count = len({result.name for result in results})
            error, ok = max(result.error for result in results), all(result.ok for result in results)
            lines.append(f"{prefix:<16}{count:5d} compared  {error:9.1e}  {tolerance:<22}  {'ok' if ok else 'MISS'}")
        for prefix in sorted({name.split(".")[0] for name in self._inputs}):
            count = sum(name.split(".")[0] == prefix for name in self._inputs)
            lines.append(f"{prefix:<16}{count:5d} used as input")
        lines += [f"MISS {r.name}: {r.why} ({r.tolerance})" for r in self._results if not r.ok]
        return lines + [f"UNCHECKED {name}" for name in self.unchecked()]

    def _miss(self, name: str, why: str) -> None:
        self._results.append(_Result(name, "shape", torch.inf, torch.inf, why))


def _declared(manifest: dict[str, Any]) -> dict[str, list[int]]:
    """Name -> shape of every tensor the manifest lists; its `tensors` are {key: ...} or {file: {key: ...}}."""
    shapes = {f"weights.{key}": list(shape) for key, shape in manifest.get("weights", {}).items()}
    for name, entry in manifest["tensors"].items():
        if "shape" in entry:
            shapes[name] = entry["shape"]
        else:
            shapes |= {f"{name}.{key}": value["shape"] for key, value in entry.items()}
    return shapes
