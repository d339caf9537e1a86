"""Sound files of every kind that fcp reads, small, in one folder."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import model_kinds, option_kinds, planning_kinds, run_kinds, source_kinds, training_kinds
from tests.fuzz.folder import SeedFolder


def write_seeds(folder: Path) -> SeedFolder:
    """Write them all."""
    planning_kinds.write_planning(folder)
    run_kinds.write_runs(folder)
    model_kinds.write_models(folder)
    source_kinds.write_sources(folder)
    training_kinds.write_training(folder)
    planning_kinds.run_fcp(folder, "manifest build texts.jsonl -o built.parquet")
    for half in (1, 2):
        planning_kinds.run_fcp(folder, f"manifest build texts.jsonl --shard {half}/2 -o half-{half}.parquet")
    option_kinds.write_odd_paths(folder)
    return SeedFolder(folder)
