"""The global batches of a manifest, a mixture or a stopped run: the sequences of each step, before any planning.

Every epoch is a permutation of the rows (their own order without shuffling), cut into global batches that never cross
an epoch. The permutation of epoch e comes from PCG64 seeded with (seed, e), so any step can be made independently.
Above `ROWS_IN_MEMORY` rows it is index-free (a Feistel network), and lengths are gathered for windows of consecutive
steps, so memory does not grow with the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fcp_cli.cost.model import vision_seconds
from fcp_cli.errors import ManifestError, OverlongError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import ROWS_IN_MEMORY, LengthTable, chunked, new_column
from fcp_cli.plan.metadata import (
    Batching,
    Continuation,
    Mixture,
    MixtureSource,
    MixtureStage,
    OverlongReport,
    PlanMetadata,
    ShuffleKind,
    offsets_by_tokens,
    steps_per_epoch,
)
from fcp_cli.plan.pricing import single_rank_work, without_pictures
from fcp_cli.planning.problem import Batch, Problem
from fcp_cli.util.arrays import Int32Array, IntArray
from fcp_cli.util.records import content_hash_of
from fcp_cli.util.words import counted

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


def settings_of(metadata: PlanMetadata) -> BatchSettings:
    """Return the batch settings of a plan."""
    return BatchSettings(
        global_batch_size=metadata.global_batch_size,
        seed=metadata.seed,
        shuffle=metadata.shuffle,
        epochs=metadata.epochs,
        last_batch=metadata.last_batch,
        max_length=metadata.overlong.max_length,
        overlong=metadata.overlong.policy,
        step_limit=metadata.step_limit,
        batching=metadata.batching,
        mixture=metadata.mixture,
    )


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
        rows, sequences = self._sequences(step)
        return batch_of(sequences, self.problem, step=step, rows=rows, seed=step_seed(self.settings.seed, step))

    def rows_of(self, step: int) -> IntArray:
        """Return the manifest rows of a step, counted from 0."""
        return self._sequences(step)[0]

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


def batch_of(
    sequences: LengthTable, problem: Problem, *, step: int = 0, rows: IntArray | None = None, seed: int = 0
) -> Batch:
    """Return the sequences as one global batch, with their work on a single rank; `rows` default to their positions."""
    # If all ranks of a wave share the encoder's work, it is no part of a sequence's own.
    shares = problem.encoder_balance is not None
    own = without_pictures(sequences) if shares else sequences
    return Batch(
        step=step,
        rows=np.arange(len(sequences)) if rows is None else rows,
        lengths=sequences.length_tokens.astype(np.int32),
        work=single_rank_work(own, problem.profile, problem.padding_multiple),
        encoder_seconds=vision_seconds(sequences, problem.profile) if shares else None,
        seed=seed,
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
        ranks, node = -(-longest // problem.tokens_per_rank), problem.ranks_per_node
        more = f"--ranks {ranks if ranks <= node else -(-ranks // node) * node}"  # whole nodes
        options = options_that_hold(longest) if options_that_hold else ""
        hold += options or more
        more_ranks = f", or more devices: {more}" if options else ""
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


# Mixtures of manifests: parsing of `--mix`, reading of the sources, and the rows of each step.

_FACTORS = ("eta", "vision_patches", "vision_patch_pairs")


def read_mixture(
    words: Sequence[str], *, length_column: str, before: Mixture | None = None, first_step: int = 0
) -> tuple[LengthTable, Mixture]:
    """Read the manifests of `--mix FILE:WEIGHT[@STEP]`; a weight applies from its step on.

    Args:
        words: the arguments, as typed; sources keep the order in which they are first named.
        length_column: the length column of every manifest.
        before: mixture of the run to continue, or None. Its sources come first, and its stages apply before
            `first_step`.
        first_step: default step of a weight, and the smallest allowed.

    Returns:
        The joined manifest of all sources, and the mixture.

    Raises:
        UsageError: a word is not FILE:WEIGHT[@STEP], a weight is negative or given twice, or those of a stage sum to 0.
        ManifestError: a manifest cannot be read, is given under two names, or has other columns than the first.
    """
    weights: dict[int, dict[str, float]] = {}
    for word in words:
        name, weight, step = _parsed(word, first_step)
        if name in weights.setdefault(step, {}):
            raise UsageError(f"--mix gives {name} twice from step {step} on; give each manifest one weight")
        weights[step][name] = weight
    names = list(dict.fromkeys(name for stage in weights.values() for name in stage))
    tables = [read_manifest(Path(name), length_column=length_column) for name in names]
    sources = [
        MixtureSource(name=source, rows=len(table), content_hash=table.content_hash())
        for source, table in zip(_source_names(names), tables, strict=True)
    ]
    _require_distinct(names, sources)
    if before is not None:
        names, tables, sources = _after(before, names, tables, sources)
    stages = [] if before is None else [stage for stage in before.stages if stage.first_step < first_step]
    stages = [replace(stage, weights=stage.weights + (0.0,) * (len(names) - len(stage.weights))) for stage in stages]
    now: dict[str, float] = dict.fromkeys(names, 0.0)
    for step, changed in sorted(weights.items()):
        now |= changed
        if not 0 < sum(now.values()) < np.inf:
            raise UsageError(f"the weights of --mix from step {step} on sum to {sum(now.values()):g}; give one above 0")
        stages.append(MixtureStage(first_step=step, weights=tuple(now.values())))
    if stages[0].first_step:
        raise UsageError(f"--mix gives no weight for steps 0 to {stages[0].first_step - 1}; add one without @STEP")
    mixture = Mixture(sources=tuple(sources), stages=tuple(stages))
    if fault := mixture.fault(sum(map(len, tables))):
        raise ManifestError(f"--mix: {fault}; rename one of its manifests")
    return _joined(names, tables, mixture), mixture


def planned_manifest(metadata: PlanMetadata, paths: Sequence[Path], *, length_column: str) -> LengthTable:
    """Read the manifest of a plan, or join all manifests of its mixture, given in any order.

    Raises:
        UsageError: several manifests are named, but the plan has only one.
        ManifestError: a manifest cannot be read, is not in the plan's mixture, or is missing.
    """
    if metadata.mixture is None:
        return read_manifest(one_manifest(metadata, paths), length_column=length_column)
    found = mixed_manifests(metadata.mixture, paths, length_column=length_column)
    tables = [read_manifest(path, length_column=length_column) for path in found]
    return _joined(list(map(str, found)), tables, metadata.mixture)


def one_manifest(metadata: PlanMetadata, paths: Sequence[Path]) -> Path:
    """Return the only manifest of a plan without a mixture.

    Raises:
        UsageError: several manifests are named.
    """
    if len(paths) > 1:
        raise UsageError(f"the plan is of one manifest, {metadata.manifest.name}, but --manifest names {len(paths)}")
    return paths[0]


def mixed_manifests(mixture: Mixture, paths: Sequence[Path], *, length_column: str) -> list[Path]:
    """Return the manifests of a plan's mixture in the order of its sources, identified by their content.

    Raises:
        ManifestError: a manifest cannot be read, is not in the plan's mixture, or is missing.
    """

    def hash_of(path: Path) -> str:
        return read_manifest(path, length_column=length_column).content_hash()

    found = {content_hash_of(path, partial(hash_of, path), column=length_column): path for path in paths}
    for source in mixture.sources:
        if source.content_hash not in found:
            named = ", ".join(map(str, paths))
            raise ManifestError(
                f"the plan mixes {source.name}, which is none of {named}, or was changed since; name it with --manifest"
            )
    for content_hash in found.keys() - {source.content_hash for source in mixture.sources}:
        names = ", ".join(source.name for source in mixture.sources)
        raise ManifestError(f"{found[content_hash]} is none of the manifests that the plan mixes: {names}")
    return [found[source.content_hash] for source in mixture.sources]


def _source_names(names: Sequence[str]) -> list[str]:
    """Return the names of the sources in a plan: file names, with parent folders if needed to make them unique."""
    parts = [Path(name).absolute().parts for name in names]
    for depth in count(1):
        short = ["/".join(one[-depth:]) for one in parts]
        if len(set(short)) == len(set(parts)):
            break
    # Folders only for those that share a file name.
    files = [one[-1] for one in parts]
    return [file if files.count(file) == 1 else one for file, one in zip(files, short, strict=True)]


def _parsed(word: str, first_step: int) -> tuple[str, float, int]:
    name, _, rest = word.rpartition(":")
    weight, _, step = rest.partition("@")
    try:
        value, begin = float(weight), int(step or first_step)
    except ValueError:
        name = ""
        value, begin = 0.0, first_step
    if not name or not 0 <= value < np.inf:
        raise UsageError(f"--mix is {word!r}; it must be FILE:WEIGHT, or FILE:WEIGHT@STEP, with a weight of at least 0")
    if begin < first_step:
        raise UsageError(f"--mix {word} begins before step {first_step}, but the run is trained up to that step")
    return name, value, begin


def _require_distinct(names: Sequence[str], sources: Sequence[MixtureSource]) -> None:
    seen: dict[str, str] = {}
    for name, source in zip(names, sources, strict=True):
        other = seen.setdefault(source.content_hash, name)
        if other != name:
            raise ManifestError(f"--mix gives {name}, which has the lengths of {other}; give each manifest once")


def _after(
    before: Mixture, names: list[str], tables: list[LengthTable], sources: list[MixtureSource]
) -> tuple[list[str], list[LengthTable], list[MixtureSource]]:
    """Put the sources of the earlier mixture first, so that their row numbers do not change."""
    hashes = [source.content_hash for source in sources]
    missing = [source.name for source in before.sources if source.content_hash not in hashes]
    if missing:
        raise ManifestError(
            f"the run trained {missing[0]}, which --mix does not name, or which was changed; add --mix "
            f"{missing[0]}:0 to train no more of it"
        )
    order = [hashes.index(source.content_hash) for source in before.sources]
    order += [place for place in range(len(names)) if place not in order]
    known = len(before.sources)  # these keep their recorded names, which training loops refer to
    return (
        [names[at] for at in order],
        [tables[at] for at in order],
        [*before.sources, *(sources[at] for at in order[known:])],
    )


def _joined(names: Sequence[str], tables: Sequence[LengthTable], mixture: Mixture) -> LengthTable:
    """Return one table with the rows of all sources, in order."""
    first = tables[0]
    for name, table in zip(names, tables, strict=True):
        if table.column != first.column:
            raise ManifestError(
                f"{name} has its lengths in the column {table.column!r}, {names[0]} in {first.column!r}; "
                "name one that both have with --length-column"
            )
        if table.masks is not None:
            raise ManifestError(f"{name} was built with masks, which a mixture cannot carry; plan it alone")
    columns: dict[str, Any] = {}
    rows = sum(map(len, tables))
    for column in ("length_tokens", *_FACTORS):
        given = [getattr(table, column) for table in tables]
        if all(values is None for values in given):
            continue
        whole = new_column(rows, np.float64 if column == "eta" else np.int64)
        start = 0
        for table, values in zip(tables, given, strict=True):
            for at, part in () if values is None else chunked(values):
                whole[start + at : start + at + len(part)] = part
            start += len(table)
        columns[column] = whole
    return LengthTable(name="+".join(source.name for source in mixture.sources), column=first.column, **columns)


class MixedRows:
    """The rows of a mixture's steps, as positions among the kept rows of all sources.

    A source is repeated as often as needed, with another permutation in each of its epochs.

    Args:
        mixture: sources and stages.
        kept: [sources] number of rows of each source after overlong ones are dropped.
        batch_size: sequences per step.
        seed: seed of the permutations; None: rows in their own order.

    Raises:
        ManifestError: a source with a positive weight has no row left.
    """

    def __init__(self, mixture: Mixture, kept: IntArray, *, batch_size: int, seed: int | None) -> None:
        self._mixture, self._kept, self._batch_size, self._seed = mixture, kept, batch_size, seed
        self._begins = np.zeros((1, len(kept)), dtype=np.int64)  # [steps + 1, sources] sequences before each step
        for source, left in enumerate(kept.tolist()):
            if not left and any(stage.weights[source] for stage in mixture.stages):
                name = mixture.sources[source].name
                raise ManifestError(f"{name}: all its sequences are overlong; remove it from --mix")

    def places(self, step: int) -> IntArray:
        """Return [batch_size] the positions of a step's sequences, source by source."""
        if step + 1 >= len(self._begins):
            end = max(step + 1, 2 * len(self._begins))
            counts = self._mixture.counts(0, end, self._batch_size)
            self._begins = np.concatenate((self._begins[:1], np.cumsum(counts, axis=0)))
        before = np.concatenate(([0], np.cumsum(self._kept)))
        found = []
        for source in range(len(self._kept)):
            begin, end = self._begins[step : step + 2, source].tolist()
            if begin < end:
                found.append(before[source] + self._of_source(source, np.arange(begin, end, dtype=np.int64)))
        return np.concatenate(found)

    def _of_source(self, source: int, positions: IntArray) -> IntArray:
        rows = int(self._kept[source])
        epochs, places = np.divmod(positions, rows)
        if self._seed is None:
            return places
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = permuted(places[here], rows, (self._seed, epoch, source))
        return places


# Index-free shuffling: a keyed permutation that is evaluated at any position in constant time and memory.
#
# A Feistel network permutes the smallest power of four that covers all rows. Values beyond the rows are permuted
# again until they fall inside (cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002).
# The result is a permutation for every key, and the same on every machine.

_ROUNDS: Final = 8
# Multipliers of the splitmix64 finalizer, in which every output bit depends on all input bits.
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permuted(positions: IntArray, rows: int, key: Sequence[int]) -> IntArray:
    """Return [n] the rows at these positions of the keyed permutation of `rows` rows.

    Args:
        positions: [n] positions, 0 to rows - 1.
        rows: number of rows.
        key: integers such as seed and epoch; every key gives another permutation.
    """
    round_keys = np.random.SeedSequence(list(key), spawn_key=(2,)).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    half_bits = max(1, -(-max(rows - 1, 1).bit_length() // 2))
    values = _encrypted(positions.astype(np.uint64), half_bits, round_keys)
    outside = np.flatnonzero(values >= rows)
    while len(outside):
        values[outside] = _encrypted(values[outside], half_bits, round_keys)
        outside = outside[values[outside] >= rows]
    return values.astype(np.int64)


def _encrypted(
    values: npt.NDArray[np.uint64], half_bits: int, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in round_keys:
        mixed = right + key  # uint64 addition wraps around
        for amount, factor in zip((30, 27), _MIX, strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(amount))) * factor
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    encrypted: npt.NDArray[np.uint64] = (left << shift) | right
    return encrypted


# Global batches of the remaining steps of a run, unchanged, so that the run keeps its batches, steps and schedule.


@dataclass(frozen=True, kw_only=True, slots=True)
class RemainingSteps:
    """Untrained steps of a plan.

    Attributes:
        continues: the run up to these steps.
        offsets: [steps + 1] offsets of each step's sequences.
        rows, lengths: manifest row and planned tokens of each sequence.
        overlong: policy of the plan for overlong sequences.
    """

    continues: Continuation
    offsets: IntArray
    rows: IntArray
    lengths: Int32Array
    overlong: OverlongReport


class SampledBatches(GlobalBatches):
    """Some of a plan's global batches, for strategies that tune themselves on the batches they plan.

    The longest sequence is that of the whole plan, which a strategy must hold.
    """

    def __init__(self, batches: GlobalBatches, steps: Sequence[int]) -> None:
        vars(self).update(vars(batches))
        self._batches, self._steps = batches, steps

    @property
    def longest_tokens(self) -> int:
        return self._batches.longest_tokens

    def __len__(self) -> int:
        return len(self._steps)

    def batch(self, step: int) -> Batch:
        return self._batches.batch(self._steps[step])


class RemainingBatches(GlobalBatches):
    """Global batches of `remaining`; `batch(0)` is the first untrained one.

    Raises:
        OverlongError: the ranks cannot hold the longest remaining sequence.
    """

    def __init__(
        self, table: LengthTable, problem: Problem, settings: BatchSettings, remaining: RemainingSteps
    ) -> None:
        _require_room(table, problem, remaining)
        self.problem = problem
        self.settings = settings
        self.overlong = remaining.overlong
        # Planned lengths, since overlong sequences may have been truncated.
        lengths = table.length_tokens.copy()
        lengths[remaining.rows] = remaining.lengths
        self.table = replace(table, length_tokens=lengths)
        self.continues = remaining.continues
        self._remaining = remaining
        self._offsets = None
        self.sequences = len(self.rows)

    @property
    def rows(self) -> IntArray:
        """[rows] remaining manifest rows, ascending."""
        return np.unique(self._remaining.rows)

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a remaining sequence."""
        return int(self._remaining.lengths.max())

    def __len__(self) -> int:
        return len(self._remaining.offsets) - 1

    def batch(self, step: int) -> Batch:
        """Return the global batch of a remaining step, counted from 0."""
        members = slice(self._remaining.offsets[step], self._remaining.offsets[step + 1])
        rows = self._remaining.rows[members]
        number = self._remaining.continues.first_step + step
        seed = step_seed(self.settings.seed, number)
        batch = batch_of(self.table.take(rows), self.problem, step=number, rows=rows, seed=seed)
        return replace(batch, lengths=self._remaining.lengths[members])


class ChangedMixture(GlobalBatches):
    """Global batches of a mixture that continues a run with changed weights; `batch(0)` is the first untrained one.

    Raises:
        OverlongError, ManifestError: as in `GlobalBatches`, or no step remains.
    """

    def __init__(
        self,
        table: LengthTable,
        problem: Problem,
        settings: BatchSettings,
        continues: Continuation,
        options_that_hold: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__(table, problem, settings, options_that_hold)
        self.continues = continues
        if len(self) < 1:
            raise ManifestError(f"{table.name}: step {self.first_step} is beyond its last; the run is complete")

    def __len__(self) -> int:
        return super().__len__() - self.first_step

    def batch(self, step: int) -> Batch:
        """Return the global batch of a remaining step, counted from 0."""
        return super().batch(self.first_step + step)


def _require_room(table: LengthTable, problem: Problem, remaining: RemainingSteps) -> None:
    most = problem.num_ranks * problem.tokens_per_rank
    longest = int(np.argmax(remaining.lengths))
    tokens = int(remaining.lengths[longest])
    if tokens > most:
        raise OverlongError(
            f"{table.name}: row {remaining.rows[longest]} ({tokens} tokens) is still to be trained, but "
            f"{problem.num_ranks} ranks of {problem.tokens_per_rank} tokens hold at most {most}; give "
            f"--tokens-per-rank {-(-tokens // problem.num_ranks)}, or at least "
            f"{-(-tokens // problem.tokens_per_rank)} --ranks"
        )
