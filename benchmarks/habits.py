"""What plans gain over how people fine-tune today: padded batches, and packs of best fit under data parallelism.

    python -m benchmarks.habits
    python -m benchmarks.habits --documents lengths.parquet

Predicted seconds of an optimizer step on one node of eight H200s, over those of fcp, for three kinds of data: short
conversations, long documents (a family of `workloads`, or a manifest of your own), and questions about images. The
recipe is the quickest for fcp; each strategy runs under its better sync.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.clips import media_records
from benchmarks.workloads import family_table
from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.detect import SourceOptions, open_source
from fcp_cli.planning.compare import compare
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import resolve
from fcp_cli.util.console import Assumptions

_NAMES = ("fcp", "static", "packing", "padded")
_ROWS = 8192


def conversations(folder: Path) -> Path:
    """Short conversations: median 500 tokens, cut at 8,192 (assumed)."""
    drawn = np.random.default_rng(0).lognormal(np.log(500.0), 0.9, _ROWS)
    return _written(folder / "conversations.parquet", np.clip(drawn, 16, 8192).astype(np.int64))


def documents(folder: Path) -> Path:
    """The `commoncrawl` family: documents of up to 131,072 tokens."""
    return _written(folder / "documents.parquet", family_table("commoncrawl", sequences=_ROWS, seed=0).length_tokens)


def images_and_text(folder: Path) -> Path:
    """Text alone, with one image, and with two to eight, of `benchmarks.clips` without its clips."""
    sizes, manifest = folder / "sizes.jsonl", folder / "images.parquet"
    still = (one for one in media_records("mixed", 3 * _ROWS, seed=0) if "videos" not in one)
    with sizes.open("w", encoding="utf-8") as stream:
        for _, record in zip(range(_ROWS), still, strict=False):
            stream.write(json.dumps(record) + "\n")
    build_manifest(open_source(sizes, "media", SourceOptions(processor="qwen3-vl")), manifest)
    return manifest


def _written(path: Path, lengths: np.ndarray) -> Path:
    pq.write_table(pa.table({"length": lengths}), path)
    return path


def rows(documents_at: Path | None, ranks: int) -> Iterator[str]:
    """Yield the table, line by line, as Markdown."""
    yield "| data | mean, longest | fcp, s a step | static (degree) | packing | padded |"
    yield "|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = {
            "conversations": (conversations(folder), "qwen3-8b"),
            "long documents": (documents_at or documents(folder), "qwen3-8b"),
            "images and text": (images_and_text(folder), "qwen3-vl-8b"),
        }
        for kind, (manifest, model) in data.items():
            request = PlanRequest(
                manifest=manifest,
                model=model,
                cluster=f"h200-1x{ranks}",
                global_batch_size=128,
                steps=8,
                overlong="drop",
            )
            inputs = resolve(request, Assumptions())
            found = {
                one.name: one.best
                for one in compare(inputs.table, inputs.problem, inputs.settings, names=_NAMES, milp_seconds=1.0)
            }
            ours = found["fcp"]
            assert ours is not None
            lengths = inputs.table.length_tokens
            words = [f"{lengths.mean():,.0f}, {lengths.max():,}", f"{ours.step_seconds:.3g}"]
            for other in _NAMES[1:]:
                outcome = found[other]
                told = "none" if outcome is None else f"{outcome.step_seconds / ours.step_seconds:.2f}x"
                if outcome is not None and other == "static":
                    told += f" ({outcome.options['degree']})"
                words.append(told + (" (over memory)" if outcome is not None and outcome.over_budget else ""))
            yield f"| {kind} | {' | '.join(words)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, help="manifest in place of the family of long documents")
    parser.add_argument("--ranks", type=int, default=8, help="devices of the node")
    options = parser.parse_args()
    for row in rows(options.documents, options.ranks):
        print(row, flush=True)


if __name__ == "__main__":
    main()
