"""How evenly a group's ranks share the vision encoder's work, with and without the first stage.

    python -m benchmarks.encoder_balance --model qwen3-vl-8b

Sequences of the made-up data sets are packed in order up to a budget of tokens per rank, for groups of several degrees.
Work is counted in multiplications, by the runtime's own parts and its own sharing out; nothing is run. Without the
first stage a part is encoded where most of its tokens lie. `over 1.1` counts packs whose largest work exceeds the mean
by more than a tenth, and behind the slash those of them that some other sharing out of the same parts would keep within
it: a part is never cut, so a pack of few parts may not allow it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

import numpy as np
from scipy.optimize import LinearConstraint, milp

from benchmarks.clips import NAMES
from benchmarks.workloads import media_manifest
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.tokens import open_media
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.training.pictures import SyntheticVisuals
from fcp_cli.training.weights import model_config
from fcp_cli.vision.parts import VisualSequence, balanced_encoders

TARGET = 1.1
"""Largest over mean work of a group's ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-vl-8b")
    parser.add_argument("--processor", default="qwen3-vl")
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--tokens-per-rank", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    budget = f"{arguments.tokens_per_rank:,} tokens a rank"
    print(f"max/mean encoder work over the ranks of a group, {arguments.model}, {budget}")
    print(f"{'data set':10} degree  packs  without: mean  worst   with: mean  worst  over 1.1")
    for name in NAMES:
        drawn = [
            data_set(name, arguments.model, arguments.processor, arguments.rows, seed=seed)
            for seed in range(arguments.seeds)
        ]
        for degree in (2, 4, 8):
            found = [pack for data in drawn for pack in spreads(*data, degree, arguments.tokens_per_rank)]
            without, balanced = ([getattr(pack, which) for pack in found] for which in ("without", "balanced"))
            figures = f"{mean(without):14.2f} {max(without):6.2f} {mean(balanced):12.3f} {max(balanced):6.3f}"
            uneven = [pack for pack in found if pack.balanced > TARGET]
            avoidable = sum(could_be_even(pack.work, degree) for pack in uneven)
            print(f"{name:10} {degree:6} {len(found):6} {figures} {len(uneven):6}/{avoidable}", flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Work of the parts of a pack that has any, and largest over mean work of the ranks without and with the stage."""

    work: np.ndarray
    without: float
    balanced: float


def spreads(fetch: SyntheticVisuals, lengths: list[int], degree: int, tokens_per_rank: int) -> list[Pack]:
    """Every pack that has images or videos."""
    found = []
    for rows in packs(lengths, tokens_per_rank * degree):
        sequences = [fetch(row) for row in rows]
        work = np.array([part.work for sequence in sequences for part in sequence.parts])
        if len(work):
            without = spread(work, holders(sequences, degree), degree)
            balanced = spread(work, balanced_encoders(work.tolist(), degree), degree)
            found.append(Pack(work=work, without=without, balanced=balanced))
    return found


def could_be_even(work: np.ndarray, degree: int) -> bool:
    """Whether some sharing out of these parts keeps every rank within `TARGET` of the mean: an integer program.

    Parts of one size are alike: it asks how many of each size every rank takes.
    """
    sizes, numbers = np.unique(work * degree / work.sum(), return_counts=True)
    taken = np.zeros((len(sizes), len(sizes), degree))
    taken[np.arange(len(sizes)), np.arange(len(sizes))] = 1
    loads = np.zeros((degree, len(sizes), degree))
    loads[np.arange(degree), :, np.arange(degree)] = sizes
    found = milp(
        np.zeros(len(sizes) * degree),
        constraints=[
            LinearConstraint(taken.reshape(len(sizes), -1), numbers, numbers),
            LinearConstraint(loads.reshape(degree, -1), ub=TARGET),
        ],
        integrality=np.ones(len(sizes) * degree),
    )
    return bool(found.success)


def data_set(name: str, model: str, processor: str, rows: int, *, seed: int = 0) -> tuple[SyntheticVisuals, list[int]]:
    """Made-up sequences and their lengths."""
    manifest = media_manifest(name, processor, rows, seed=seed)
    records, lengths = open_media(manifest), read_manifest(manifest).length_tokens
    assert records is not None
    return SyntheticVisuals(records, lengths, model_config(model), seed=0), lengths.tolist()


def packs(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Rows in order, as many as fit a group; the last, partial pack is left out."""
    rows: list[int] = []
    held = 0
    for row, length in enumerate(lengths):
        if held + length > budget and rows:
            yield rows
            rows, held = [], 0
        if length <= budget:
            rows.append(row)
            held += length


def spread(work: np.ndarray, owners: np.ndarray, degree: int) -> float:
    """Largest over mean work of the ranks."""
    loads = np.bincount(owners, weights=work, minlength=degree)
    return float(loads.max() / loads.mean())


def holders(sequences: list[VisualSequence], degree: int) -> np.ndarray:
    """[parts] who holds most of each part's tokens."""
    layout = shard_layout(tuple(len(sequence.tokens) for sequence in sequences), degree)
    of_token = np.empty(layout.total_tokens, dtype=np.int64)
    for member in range(degree):
        of_token[layout.index(member)] = member
    base, found = 0, []
    for sequence in sequences:
        found += [_most(of_token[base + part.start_token :][: part.num_tokens]) for part in sequence.parts]
        base += len(sequence.tokens)
    return np.array(found)


def _most(members: np.ndarray) -> int:
    return int(np.bincount(members).argmax())


if __name__ == "__main__":
    main()
