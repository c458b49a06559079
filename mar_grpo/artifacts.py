"""Between KFP artifacts and documents: an artifact names a document by `uri` and, in its metadata, by digest.

No import of kfp: the functions use only `uri`, `metadata` and `log_metric` of what they are given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from mar_grpo.documents import DocumentRef
from mar_grpo.errors import InputError


class Artifact(Protocol):
    """What is used of kfp.dsl.Artifact."""

    uri: str
    metadata: dict[str, Any]


class Metrics(Protocol):
    """What is used of kfp.dsl.Metrics."""

    def log_metric(self, metric: str, value: float) -> None: ...


def name_document(artifact: Artifact, reference: DocumentRef, **metadata: str | int | float) -> None:
    """Let an output artifact name a document."""
    artifact.uri = reference.uri
    artifact.metadata.update(metadata, sha256=reference.sha256)


def document_of(artifact: Artifact) -> DocumentRef:
    """The document an input artifact names.

    Raises:
        InputError: it carries no digest, so it was not made by `name_document`.
    """
    if "sha256" not in artifact.metadata:
        raise InputError(
            "the artifact's metadata holds no sha256", where=artifact.uri, hint="use one of our components"
        )
    return DocumentRef(uri=artifact.uri, sha256=artifact.metadata["sha256"])


def log_finite(metrics: Metrics, values: Mapping[str, float | None]) -> None:
    """Log what is a finite number; KFP fails a step whose metrics hold anything else."""
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            metrics.log_metric(name, float(value))
