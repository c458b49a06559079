"""Makes a folder by running its check: what the check compares is what gets recorded. For folders of other sizes."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.conformance.checks import Comparison


class Recorder(Comparison):
    """A comparison that believes everything.

    Args:
        template: a folder whose tensor names the new one may have.
        manifest: of the new folder; its `tensors` and the numbers that a check compares are filled in.
        inputs: tensors that the check is given.
    """

    def __init__(
        self, template: Path, manifest: Mapping[str, Any], inputs: Mapping[str, Tensor], seed: int = 0
    ) -> None:
        super().__init__(template)
        self._names = set(self._tensors)
        self.manifest = {**copy.deepcopy(dict(manifest)), "tensors": self.manifest["tensors"]}
        self._tensors = {}
        self._given = inputs
        self._generator = torch.Generator().manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._names if name.startswith(prefix))

    def input(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._given[name]
        return super().input(name)

    def load(self, module: nn.Module, prefix: str = "") -> None:
        """Draw weights; norms are near one."""
        for name, tensor in module.state_dict().items():
            drawn = torch.randn(tensor.shape, generator=self._generator) * 0.2
            self._tensors[f"weights.{prefix}{name}"] = drawn + 1 if "norm" in name and tensor.dim() == 1 else drawn
        super().load(module, prefix)

    def equal(self, name: str, value: Tensor, **tolerance: Any) -> None:
        self._tensors.setdefault(name, value.detach().contiguous().clone())
        super().equal(name, value, **tolerance)

    def same(self, name: str, value: Any, expected: Any, **tolerance: Any) -> None:
        if name in self._tensors:
            super().same(name, value, expected, **tolerance)
        elif name.startswith("grad_norms.") and isinstance(value, Tensor):
            if name == "grad_norms.total":
                self.manifest["grad_total_norm"] = value.item()
            else:
                self.manifest["grad_norms"][name.removeprefix("grad_norms.")] = value.item()

    def write(self, folder: Path, config: Mapping[str, Any] | None = None) -> None:
        """The folder as it is read: safetensors by the first part of a name, manifest.json, and config.json if any."""
        folder.mkdir(parents=True)
        files: dict[str, dict[str, Tensor]] = {}
        shapes: dict[str, dict[str, Any]] = {}
        for name, tensor in self._tensors.items():
            stem, _, key = name.partition(".")
            files.setdefault(stem, {})[key] = tensor
            if stem != "weights":
                shapes.setdefault(stem, {})[key] = {"shape": list(tensor.shape)}
        for stem, tensors in files.items():
            save_file(tensors, folder / f"{stem}.safetensors")
        self.manifest["tensors"] = shapes
        (folder / "manifest.json").write_text(json.dumps(self.manifest))
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
