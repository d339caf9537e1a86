"""Statistics of a manifest: token counts, length distribution, and the share of the longest sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from fcp_cli.manifest.table.header import readable
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.reading.parquet import open_parquet

# Columns that count what a row has of pictures -> noun of what is counted.
PICTURE_COUNTS: Final = {"num_images": "image", "num_videos": "video", "vision_patches": "patch"}
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Sequences with `from_tokens` <= length < `to_tokens`; bounds are consecutive powers of two."""

    from_tokens: int
    to_tokens: int
    sequences: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestSummary:
    """Statistics of a manifest.

    Attributes:
        percentiles: length in tokens at each of `PERCENTILES`, as an actual length of the manifest (nearest rank).
        longest_percent_token_share: share of tokens in the longest 1 % of sequences (at least one sequence).
        bins: histogram from the shortest to the longest length, without gaps.
    """

    rows: int
    tokens: int
    min_tokens: int
    mean_tokens: float
    max_tokens: int
    percentiles: dict[float, int]
    longest_percent_token_share: float
    bins: tuple[Bin, ...]

    def as_json(self) -> dict[str, Any]:
        """Return a flat document for `--json`."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "length_tokens": {"min": self.min_tokens, "mean": self.mean_tokens, "max": self.max_tokens}
            | {f"p{percentile:g}": length for percentile, length in self.percentiles.items()},
            "longest_percent_token_share": self.longest_percent_token_share,
            "histogram": [
                {"from_tokens": b.from_tokens, "to_tokens": b.to_tokens, "sequences": b.sequences, "tokens": b.tokens}
                for b in self.bins
            ],
        }


def summarize(table: LengthTable) -> ManifestSummary:
    """Summarize all rows; sorts a copy of the lengths."""
    lengths = np.sort(table.length_tokens)
    rows, tokens = len(lengths), int(lengths.sum())
    longest = lengths[rows - max(1, rows // 100) :]
    return ManifestSummary(
        rows=rows,
        tokens=tokens,
        min_tokens=int(lengths[0]),
        mean_tokens=tokens / rows,
        max_tokens=int(lengths[-1]),
        percentiles={p: int(lengths[max(0, int(np.ceil(p / 100 * rows)) - 1)]) for p in PERCENTILES},
        longest_percent_token_share=int(longest.sum()) / tokens,
        bins=_bins(lengths),
    )


def count_pictures(path: Path) -> dict[str, int]:
    """Return the images, videos and patches of all rows of a manifest; empty if it was built without them."""
    if path.suffix != ".parquet" or not path.is_file():
        return {}
    with readable(path):
        file = open_parquet(path)
        names = [name for name in PICTURE_COUNTS if name in file.schema_arrow.names]
        if "num_images" not in names:
            return {}
        counts = dict.fromkeys(names, 0)
        for batch in file.iter_batches(columns=names):  # all rows at once would take memory that grows with the data
            for name in names:
                counts[name] += int(pc.sum(batch.column(name)).as_py() or 0)
        return counts


def _bins(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Bin, ...]:
    """Histogram ascending lengths over powers of two."""
    first, last = int(lengths[0]).bit_length() - 1, int(lengths[-1]).bit_length()
    edges = [1 << power for power in range(first, last + 1)]
    cuts = np.searchsorted(lengths, edges)
    return tuple(
        Bin(
            from_tokens=edges[i],
            to_tokens=edges[i + 1],
            sequences=int(cuts[i + 1] - cuts[i]),
            tokens=int(lengths[cuts[i] : cuts[i + 1]].sum()),
        )
        for i in range(len(edges) - 1)
    )
