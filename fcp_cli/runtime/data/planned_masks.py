"""Apply the plan's masks to sequences, and raise if data has different ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.masks import Mask, MaskedSequence, described
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.runtime.data.joined_sequences import JoinedSequences
from fcp_cli.runtime.data.loader import Fetch
from fcp_cli.vision.parts import VisualSequence


def with_planned_masks(fetch: Fetch, metadata: PlanMetadata) -> Fetch:
    """Return a fetch whose sequences have the plan's masks; `fetch` itself if the plan has none."""
    masks, name = metadata.mask_rows, metadata.manifest.name
    if masks is None:
        return fetch

    def fetch_masked(row: int) -> Any:
        found, mask = fetch(row), masks.mask(int(row))
        if isinstance(found, MaskedSequence) or (isinstance(found, VisualSequence) and not found.mask.is_causal):
            require_same(found.mask, mask, row, len(found.tokens), name)
            return found
        if mask.is_causal:
            return found
        if isinstance(found, JoinedSequences):
            raise RunError(
                f"row {row} of the data joins several sequences, but was planned with one mask ({described(mask)}); "
                "plan sequences that are joined without --mask"
            )
        if isinstance(found, VisualSequence):
            return replace(found, mask=mask)
        tokens, labels = found if isinstance(found, tuple) else (found, None)
        return MaskedSequence(tokens=tokens, labels=labels, mask=mask)

    return fetch_masked


def require_same(found: Mask, planned: Mask, row: int, tokens: int, name: str) -> None:
    """Raise RunError if the mask of a sequence of `tokens` tokens differs from the planned one."""
    if found != planned and found.areas(tokens) != planned.areas(tokens):
        raise RunError(
            f"row {row} of the data comes with another mask ({described(found)}) than it has in the plan's manifest "
            f"{name} ({described(planned)}); build the manifest from these data with 'fcp manifest build --mask', and "
            "plan again"
        )
