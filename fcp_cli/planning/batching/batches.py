"""The global batches of a manifest: the sequences of each optimizer step, before any planning.

Every epoch is a permutation of the rows (their own order without shuffling), cut into global batches that never cross
an epoch. The permutation of epoch e comes from PCG64 seeded with (seed, e), so any step can be made independently.
Above `ROWS_IN_MEMORY` rows it is index-free (`shuffling`), and lengths are gathered for windows of consecutive steps,
so memory does not grow with the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError, OverlongError
from fcp_cli.manifest.table.columns import ROWS_IN_MEMORY, chunked, new_column
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.metadata.batching import offsets_by_tokens
from fcp_cli.plan.metadata.mixture import Mixture
from fcp_cli.plan.metadata.plan_metadata import Batching, Continuation, OverlongReport, ShuffleKind, steps_per_epoch
from fcp_cli.planning.batching.mixing import MixedRows
from fcp_cli.planning.batching.shuffling import permuted
from fcp_cli.planning.problem import Batch, Problem
from fcp_cli.planning.work import batch_encoder_seconds, batch_work
from fcp_cli.words import counted

LastBatch = Literal["keep", "drop"]
OverlongPolicy = Literal["error", "drop", "truncate"]
_ROWS_NAMED = 5  # overlong rows named in the error message
# Size of a sample that a command plans in addition to its plan, in a fraction of a second. Counted, not timed, so that
# no answer depends on the machine's speed.
_SAMPLED_STEPS, _SAMPLED_SEQUENCES = 4, 2048
_WINDOW_SEQUENCES = 1 << 23  # about 0.4 GB with their work; each window costs one pass over the lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Settings that cut a manifest into global batches.

    Attributes:
        global_batch_size: sequences per optimizer step.
        seed: seed of the shuffling and of every step's solver.
        shuffle: whether to permute the rows, differently in every epoch.
        epochs: number of passes over the manifest.
        last_batch: whether to `keep` or `drop` the last, partial batch of an epoch.
        max_length: length in tokens above which a sequence is overlong; None: the capacity of all ranks.
        overlong: whether to raise an error for overlong sequences, drop them, or truncate them to the limit.
        step_limit: number of first steps to plan; None: all.
        batching: rule for batches that do not have `global_batch_size` sequences, or None. It allows a single epoch;
            batches that are `given` are the steps of the table.
        mixture: mixture of the table's sources, or None. An epoch then has as many sequences as all sources together.
    """

    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    epochs: int = 1
    last_batch: LastBatch = "keep"
    max_length: int | None = None
    overlong: OverlongPolicy = "error"
    step_limit: int | None = None
    batching: Batching | None = None
    mixture: Mixture | None = None


class GlobalBatches:
    """The global batches of a plan: `batch(step)` makes one of them, iteration makes all in order.

    Args:
        table: the manifest.
        problem: the problem to plan for.
        settings: the settings of the batches.
        options_that_hold: returns options of `fcp plan` that make room for a length, for error messages.

    Attributes:
        problem, settings: as given.
        table: the manifest, with lengths truncated under `overlong: truncate`.
        overlong: report on the treatment of overlong sequences.
        sequences: number of manifest rows that are planned.
        dropped: [dropped] overlong rows that are not planned, ascending.
        continues: the run that these batches continue, or None.

    Raises:
        OverlongError: under `overlong: error`, a sequence is longer than the limit.
        ManifestError: no sequence is left, or under `last_batch: drop` no whole batch.
    """

    continues: Continuation | None = None

    def __init__(
        self,
        table: LengthTable,
        problem: Problem,
        settings: BatchSettings,
        options_that_hold: Callable[[int], str] | None = None,
    ) -> None:
        self.problem = problem
        self.settings = settings
        self.table, self.dropped, self.overlong = _apply_length_limit(table, problem, settings, options_that_hold)
        self.sequences = len(table) - len(self.dropped)
        # The d-th dropped row has dropped[d] - d kept rows before it.
        self._kept_before = self.dropped - np.arange(len(self.dropped))
        self._epoch: tuple[int, IntArray] | None = None
        self._window: tuple[int, int, IntArray, LengthTable] | None = None  # epoch, first position, rows, their lengths
        self._offsets: IntArray | None = None  # [steps + 1] of batches cut by tokens
        self._mixed = None if settings.mixture is None else self._mixed_rows(settings.mixture)
        if settings.batching is not None and settings.batching.tokens is not None:
            lengths = self.table.length_tokens[self._epoch_rows(0, 0, self.sequences)]
            self._offsets = offsets_by_tokens(lengths, settings.batching.tokens)
        if not self.steps_per_epoch:
            raise ManifestError(_nothing_left(self))

    @property
    def rows(self) -> IntArray:
        """[sequences] manifest rows that are planned, ascending."""
        return self._kept(np.arange(self.sequences, dtype=np.int64))

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that is planned."""
        if len(self.dropped):  # all sequences above the limit
            return int(max(part[part <= (self.overlong.max_length or 0)].max(initial=0) for part in self._lengths()))
        return int(max(part.max() for part in self._lengths()))

    def _lengths(self) -> Iterator[IntArray]:
        return (part for _, part in chunked(self.table.length_tokens))

    @property
    def shuffle_kind(self) -> ShuffleKind | None:
        """`index-free` for large manifests and mixtures; None if rows are permuted in memory or not shuffled."""
        is_large = self.settings.mixture is not None or (len(self.table) > ROWS_IN_MEMORY and self._offsets is None)
        return "index-free" if self.settings.shuffle and is_large else None

    @property
    def first_step(self) -> int:
        """Number of the first step, 0 unless a run is continued."""
        return 0 if self.continues is None else self.continues.first_step

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, before any step limit."""
        if self._offsets is not None:
            return len(self._offsets) - 1
        return steps_per_epoch(self.sequences, self.settings.global_batch_size, self.settings.last_batch)

    def __len__(self) -> int:
        steps = self.steps_per_epoch * self.settings.epochs
        return steps if self.settings.step_limit is None else min(steps, self.settings.step_limit)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> Batch:
        """Make the global batch of a step, counted from 0."""
        return self._batch_of(step, *self._sequences(step))

    def _batch_of(self, step: int, rows: IntArray, sequences: LengthTable) -> Batch:
        return Batch(
            step=step,
            rows=rows,
            lengths=sequences.length_tokens.astype(np.int32),
            work=batch_work(sequences, self.problem),
            encoder_seconds=batch_encoder_seconds(sequences, self.problem),
            seed=step_seed(self.settings.seed, step),
        )

    def _sequences(self, step: int) -> tuple[IntArray, LengthTable]:
        """Return the manifest rows of a step, and a table of their lengths."""
        if self._mixed is not None:
            rows = self._kept(self._mixed.places(step))
            return rows, self.table.take(rows)
        epoch, index = divmod(step, self.steps_per_epoch)
        size = self.settings.global_batch_size
        first, end = index * size, min((index + 1) * size, self.sequences)
        if self._offsets is not None:
            first, end = self._offsets[index : index + 2].tolist()
        if len(self.table) <= ROWS_IN_MEMORY or self._offsets is not None:
            rows = self._epoch_rows(epoch, first, end)
            return rows, self.table.take(rows)
        begin, rows, window = self._window_of(epoch, first, end)
        here = slice(first - begin, end - begin)
        return rows[here], window.take(np.arange(here.start, here.stop))

    def _window_of(self, epoch: int, first: int, end: int) -> tuple[int, IntArray, LengthTable]:
        """Return first position, rows and lengths of a window of an epoch that covers positions `first` to `end`."""
        if self._window is not None and self._window[0] == epoch:
            begin, rows, table = self._window[1:]
            if begin <= first and end <= begin + len(rows):
                return begin, rows, table
        positions = np.arange(first, max(end, min(first + _WINDOW_SEQUENCES, self.sequences)), dtype=np.int64)
        if self.shuffle_kind is not None:
            positions = permuted(positions, self.sequences, (self.settings.seed, epoch))
        rows = self._kept(positions)
        self._window = (epoch, first, rows, self.table.gather(rows))
        return first, rows, self._window[3]

    def _mixed_rows(self, mixture: Mixture) -> MixedRows:
        before = np.searchsorted(self.dropped, mixture.offsets)
        return MixedRows(
            mixture,
            np.diff(mixture.offsets) - np.diff(before),
            batch_size=self.settings.global_batch_size,
            seed=self.settings.seed if self.settings.shuffle else None,
        )

    def _kept(self, places: IntArray) -> IntArray:
        """Map positions among the kept rows to manifest rows."""
        return places + np.searchsorted(self._kept_before, places, side="right")

    def _epoch_rows(self, epoch: int, first: int, end: int) -> IntArray:
        """Return the manifest rows at these positions of an epoch."""
        if not self.settings.shuffle:
            return self._kept(np.arange(first, end, dtype=np.int64))
        if self._epoch is None or self._epoch[0] != epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.settings.seed, epoch])))
            self._epoch = (epoch, generator.permutation(self.rows))
        return self._epoch[1][first:end]


def batches_of(lengths: npt.ArrayLike, problem: Problem) -> GlobalBatches:
    """Return a single global batch of sequences with these lengths in tokens, in this order, for testing a solver."""
    table = LengthTable(name="lengths", length_tokens=np.asarray(lengths, dtype=np.int64))
    return GlobalBatches(table, problem, BatchSettings(global_batch_size=len(table), shuffle=False))


def batch_of(sequences: LengthTable, problem: Problem, *, step: int = 0) -> Batch:
    """Return the sequences as one global batch, priced for the problem; its `rows` are positions in `sequences`."""
    lengths = sequences.length_tokens
    return Batch(
        step=step,
        rows=np.arange(len(lengths)),
        lengths=lengths.astype(np.int32),
        work=batch_work(sequences, problem),
        encoder_seconds=batch_encoder_seconds(sequences, problem),
        seed=0,
    )


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step's solver, derived from the plan's seed and the step."""
    return int(np.random.SeedSequence([seed, step], spawn_key=(1,)).generate_state(1)[0])


def _apply_length_limit(
    table: LengthTable,
    problem: Problem,
    settings: BatchSettings,
    options_that_hold: Callable[[int], str] | None,
) -> tuple[LengthTable, IntArray, OverlongReport]:
    most = problem.num_ranks * problem.tokens_per_rank
    limit = min(settings.max_length or most, most)
    overlong = np.concatenate([first + np.flatnonzero(part > limit) for first, part in chunked(table.length_tokens)])
    if len(overlong) and settings.overlong == "error":
        raise OverlongError(_overlong_message(table, overlong, problem, limit, options_that_hold))
    report = OverlongReport(
        policy=settings.overlong,
        max_length=settings.max_length if settings.overlong == "error" else limit,
        sequences=len(overlong),
    )
    if settings.overlong == "drop":
        return table, overlong, report
    if len(overlong):
        cut = new_column(len(table), np.int64)
        for first, part in chunked(table.length_tokens):
            cut[first : first + len(part)] = np.minimum(part, limit)
        table = replace(table, length_tokens=cut)
    return table, overlong[:0], report


def _overlong_message(
    table: LengthTable,
    overlong: IntArray,
    problem: Problem,
    limit: int,
    options_that_hold: Callable[[int], str] | None,
) -> str:
    lengths = table.length_tokens
    named = ", ".join(f"row {row} ({lengths[row]} tokens)" for row in overlong[:_ROWS_NAMED].tolist())
    others = f" and {len(overlong) - _ROWS_NAMED} more" if len(overlong) > _ROWS_NAMED else ""
    most, longest = problem.num_ranks * problem.tokens_per_rank, int(lengths.max())
    fits = f"{problem.num_ranks} ranks of {problem.tokens_per_rank} tokens hold at most {most}"
    hold, more_ranks = f"--max-length {longest} " if limit < most else "", ""
    if limit < most:
        fits += f" and --max-length allows {limit}"
    if longest > most:
        least_ranks = -(-longest // problem.tokens_per_rank)
        hold += options_that_hold(longest) if options_that_hold else f"--ranks {least_ranks}"
        more_ranks = "" if "--ranks" in hold else f", or more devices: --ranks {least_ranks}"
    shorter = lengths[lengths <= limit]
    kept = f"the longest of the others has {shorter.max()}" if len(shorter) else "no other is left"
    return (
        f"{table.name}: {len(overlong)} of {counted(len(table), 'sequence')} cannot be planned: {named}{others}; "
        f"{fits}; {kept}; add --overlong drop to skip them (truncate cuts them), or {hold.strip()} to hold them"
        f"{more_ranks}"
    )


def _nothing_left(batches: GlobalBatches) -> str:
    table, settings = batches.table, batches.settings
    if not batches.sequences:
        return f"{table.name}: all {len(table)} sequences are longer than {batches.overlong.max_length} tokens"
    return (
        f"{table.name}: {counted(batches.sequences, 'sequence')} cannot fill one global batch of "
        f"{settings.global_batch_size}; "
        "lower --global-batch-size or use --last-batch keep"
    )


def spread_steps(steps: int, most: int, *, phase: float = 0.0) -> list[int]:
    """Return at most `most` evenly spaced steps out of `steps`; `phase` 0.5 shifts them by half a stride."""
    count = min(steps, most)
    return [int((k + phase) * steps / count) for k in range(count)]


def sampled_steps(steps: int, global_batch_size: int) -> list[int]:
    """Return a few evenly spaced steps of a plan, to plan once more; none if a single step would take too long."""
    return spread_steps(steps, min(_SAMPLED_STEPS, _SAMPLED_SEQUENCES // global_batch_size))
