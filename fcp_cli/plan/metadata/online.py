"""Settings of a job that plans while it trains, shared by its ranks and its planner process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata.plan_metadata import METADATA_KEY, PlanMetadata, parse_metadata
from fcp_cli.reading.documents import read_json
from fcp_cli.reading.inputs import require_input
from fcp_cli.validation import Count, NonNegativeCount, validated
from fcp_cli.words import first_sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineOptions:
    """Options of online planning.

    Attributes:
        ahead: steps planned ahead of the training step; 0 if a batch depends on the previous step.
        stream_begins: position of the data stream after a restart: `over` at its first sequence, or `here` at the
            current step, as for rollouts.
        refit_every: steps between refits of the profile to measured micro-batches; None: never.
    """

    ahead: NonNegativeCount = 2
    stream_begins: Literal["over", "here"] = "over"
    refit_every: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineSettings:
    """Settings of an online plan: plan metadata without totals, and planning options."""

    metadata: PlanMetadata
    options: OnlineOptions

    def to_json(self) -> str:
        return json.dumps({"metadata": json.loads(self.metadata.to_json()), "options": asdict(self.options)})


def settings_of_json(document: Mapping[str, Any], *, name: str) -> OnlineSettings:
    """Parse the document of `OnlineSettings.to_json`; `name` identifies the file in messages."""
    where = f"{name}: it does not say what to plan for"
    if not isinstance(document, Mapping) or set(document) != {"metadata", "options"}:
        raise RunError(where)
    metadata = parse_metadata({METADATA_KEY: json.dumps(document["metadata"]).encode()}, name=name)
    return OnlineSettings(
        metadata=metadata, options=validated(document["options"], OnlineOptions, where=where, error=RunError)
    )


def read_online_settings(path: Path) -> OnlineSettings:
    """Read the settings that `fcp launch --online` wrote."""
    try:
        require_input(path, seekable=True)
    except OSError as error:
        raise RunError(f"cannot read {path}: {first_sentence(error)}") from error
    return settings_of_json(read_json(path, error=RunError), name=str(path))


def manifest_of(plan: Path) -> Path:
    """Return the path of the manifest that an online plan records its lengths in."""
    return plan.with_name(f"{plan.stem}.lengths.parquet")
