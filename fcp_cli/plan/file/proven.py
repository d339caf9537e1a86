"""Reading of a plan's metadata with its hash verified."""

from __future__ import annotations

from pathlib import Path

from fcp_cli.errors import PlanError
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.again import plan_again
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.reading.verified import content_hash_of


def read_proven(path: Path) -> PlanMetadata:
    """Return a plan's metadata after verifying the file's content against its plan hash.

    Raises:
        PlanError: the plan is missing, damaged or was edited.
    """
    reader = PlanReader(path)
    if content_hash_of(path, reader.content_hash) != reader.metadata.plan_hash:
        raise PlanError(
            f"{path} was edited: its content does not match its plan hash; make it again with: "
            f"{plan_again(reader.metadata, path)}"
        )
    return reader.metadata
