"""A small real run that the tests of the trainer and the launcher share: text, its manifest, a hand-made plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.text import TextTree
from fcp_cli.manifest.tokenizer import open_tokenizer
from fcp_cli.plan.file import plan_writer
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata, Sync
from fcp_cli.plan.step import StepPlan
from tests.forked_ranks import shared
from tests.patience import PATIENCE_SECONDS

NUM_RANKS = 4
SEQUENCES_PER_STEP = 6

# (ranks, how many of the step's sequences) per micro-batch; groups overlap, change every step, and leave gaps.
_ITERATION_STEPS: tuple[tuple[tuple[tuple[int, ...], int], ...], ...] = (
    (((0, 1, 2), 2), ((3,), 1), ((0, 3), 1), ((1, 2), 2)),
    (((0, 2), 3), ((1, 3), 2), ((2,), 1)),
    (((0, 1, 2, 3), 1), ((1,), 2), ((0, 2, 3), 3)),
    (((1, 2), 4), ((0,), 2), ((3,), 0)),
)
# Waves: in each, every rank takes part once.
_WAVE_STEPS: tuple[tuple[tuple[tuple[tuple[int, ...], int], ...], ...], ...] = (
    ((((0, 1, 2), 2), ((3,), 1)), (((0, 3), 1), ((1, 2), 2))),
    ((((0, 1, 2, 3), 3),), (((1, 3), 2), ((0,), 1), ((2,), 0))),
)


def write_text(folder: Path, *, files: int = 24, seed: int = 0) -> Path:
    """Files of a few hundred bytes of text that a small model can learn."""
    words = ["plan", "ring", "rank", "wave", "token", "group", "degree", "pack", "step", "node"]
    draw = np.random.default_rng(seed)
    folder.mkdir()
    for number in range(files):
        count = int(draw.integers(5, 120))
        (folder / f"{number:03d}.txt").write_text(" ".join(draw.choice(words, count)))
    return folder


def write_manifest(folder: Path) -> Path:
    """`lengths.parquet` of a text folder that is made beside it."""
    manifest = folder / "lengths.parquet"
    root = write_text(folder / "text").resolve()
    build_manifest(TextTree(root=root, tokenizer=open_tokenizer("bytes")), manifest)
    return manifest


def write_small_plan(
    path: Path,
    manifest: Path,
    *,
    steps: int,
    sync: Sync = "iteration",
    num_ranks: int = NUM_RANKS,
    ranks_per_node: int | None = None,
    model: str = "",
    cost_profile: str = "",
) -> Path:
    """A plan over the manifest's rows, in order and again from the start, as often as it takes."""
    table = read_manifest(manifest)
    metadata = PlanMetadata(
        fcp_version="test",
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node or num_ranks,
        sync=sync,
        global_batch_size=SEQUENCES_PER_STEP,
        tokens_per_rank=4096,
        seed=0,
        shuffle=False,
        solver="by hand",
        manifest=ManifestReference(name=manifest.name, rows=len(table), content_hash=table.content_hash()),
        cost_profile=cost_profile or (f"model: {model}\n" if model else ""),
    )
    with plan_writer(path, metadata) as writer:
        for number in range(steps):
            writer.append(_step(number, table.length_tokens, sync, num_ranks))
    return path


def _step(number: int, lengths: np.ndarray, sync: Sync, num_ranks: int) -> StepPlan:
    rows = _rows(number, sync, num_ranks)
    wanted = sum(count for _, count, _ in rows)
    sequences = np.arange(number * SEQUENCES_PER_STEP, number * SEQUENCES_PER_STEP + wanted) % len(lengths)
    offsets = np.cumsum([0, *(count for _, count, _ in rows)])
    seconds = np.array(
        [
            1e-5 * lengths[sequences[start:stop]].sum() / len(ranks)
            for (ranks, _, _), start, stop in zip(rows, offsets[:-1], offsets[1:], strict=True)
        ]
    )
    return StepPlan(
        step=number,
        wave=np.array([wave for _, _, wave in rows], dtype=np.int32),
        rank_offsets=np.cumsum([0, *(len(ranks) for ranks, _, _ in rows)], dtype=np.int64),
        ranks=np.array([rank for ranks, _, _ in rows for rank in ranks], dtype=np.int32),
        sequence_offsets=offsets.astype(np.int64),
        sequences=sequences,
        lengths=lengths[sequences].astype(np.int32),
        start_seconds=np.zeros(len(rows)),
        seconds=seconds,
        makespan_seconds=float(seconds.sum()),
        bound_seconds=float(seconds.max()),
    )


def _rows(number: int, sync: Sync, num_ranks: int) -> list[tuple[tuple[int, ...], int, int]]:
    """(ranks, sequences, wave) of each micro-batch of a step."""
    if num_ranks != NUM_RANKS:  # one ring of all ranks
        return [(tuple(range(num_ranks)), SEQUENCES_PER_STEP, -1 if sync == "iteration" else 0)]
    if sync == "iteration":
        return [(ranks, count, -1) for ranks, count in _ITERATION_STEPS[number % len(_ITERATION_STEPS)]]
    waves = _WAVE_STEPS[number % len(_WAVE_STEPS)]
    return [(ranks, count, wave) for wave, groups in enumerate(waves) for ranks, count in groups]


def fcp_command(*words: str) -> list[str]:
    """`fcp ...` as the interpreter that runs the tests has it."""
    return [sys.executable, "-m", "fcp_cli", *words]


def run_fcp(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `fcp ...` in a folder to its end, in this process if it launches no job.

    A job of one rank, too, computes with one thread, as the conftest says why.
    """
    if words[0] != "launch":
        from tests.cli.planning_folder import fcp  # ranks, which import this file, need no command

        return fcp(*words, cwd=folder, **environment)
    return subprocess.run(
        fcp_command(*words),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **shared(), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def ranks_in(folder: Path) -> list[int]:
    """Live processes whose plan is in this folder, and forked ranks that work there; a killed one takes a moment to go."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            planned = f"FCP_PLAN={folder}".encode() in (entry / "environ").read_bytes()
            forked = (entry / "comm").read_text().startswith("rank ") and (entry / "cwd").readlink() == folder
        except OSError:
            continue
        if planned or forked:
            found.append(int(entry.name))
    return found
