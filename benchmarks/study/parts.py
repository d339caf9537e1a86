"""The parts of the study: which settings each runs, and their results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from types import TracebackType
from typing import Any, TypeVar

from benchmarks.study.published import DHP_CLUSTER, FCP_CLUSTER, Encoder
from benchmarks.study.runs import (
    OURS,
    PAPER,
    STRATEGIES,
    SYNCS,
    Cell,
    EncoderGain,
    run_cell,
    run_encoder_gain,
)
from benchmarks.study.workload import (
    AS_SHIPPED,
    BATCH_SIZE,
    CLIP_DATASETS,
    RANKS,
    TEXT_DATASETS,
    TEXT_MODELS,
    VISION_MODELS,
    Setting,
    Source,
    extreme_table,
    make_table,
    source_of,
)
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync

_T = TypeVar("_T")
_PER_RANK = 8  # sequences beyond 64 ranks, as 512 on 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """How much of the study is run.

    Attributes:
        steps: planned and averaged in every cell.
        budgets: tokens a rank of the variants.
        scale_ranks: of the scalability part, ascending powers of two.
        paper_ranks: the most for which the papers' algorithm plans, whose tables grow with ranks times packs.
        short_counts: short sequences beside the long one, in the extreme batches.
        seeds: of them.
    """

    clusters: Sequence[str] = (DHP_CLUSTER, FCP_CLUSTER)
    text_models: Sequence[str] = TEXT_MODELS
    vision_models: Sequence[str] = VISION_MODELS
    steps: int = 10
    budgets: Sequence[int] = (8_192, 16_384, 32_768)
    scale_ranks: Sequence[int] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    paper_ranks: int = 512
    short_counts: Sequence[int] = (32, 64, 128, 256, 511)
    seeds: int = 3
    workers: int = 1


QUICK = Scope(
    clusters=(FCP_CLUSTER,),
    text_models=("qwen3-1.7b",),
    vision_models=("internvl3-2b", "qwen3-vl-2b"),
    steps=1,
    budgets=(8_192,),
    scale_ranks=(8, 16),
    short_counts=(32,),
    seeds=1,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extreme:
    """Mean step seconds of every strategy for batches of one long and so many short sequences."""

    cluster: str
    short: int
    seconds: Mapping[tuple[str, Sync], float]

    def speedups(self, *, of: str = OURS, over: str) -> list[float]:
        """Under each of `SYNCS`."""
        return [self.seconds[over, sync] / self.seconds[of, sync] for sync in SYNCS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Everything that the page shows.

    Attributes:
        grid: every model, data set, encoder and cluster.
        variants: (what is changed, cell): what decides the speed-up.
        gains: plans that know the encoder against plans that do not.
        scaling: one model over the number of ranks.
        extremes: one long sequence among short ones.
    """

    scope: Scope
    grid: list[Cell]
    variants: list[tuple[str, Cell]]
    gains: list[EncoderGain]
    scaling: list[Cell]
    extremes: list[Extreme]


def run_study(scope: Scope, say: Callable[[str], None]) -> Study:
    """Run all parts; `say` is told what is being done."""
    settings, knowing = list(grid_settings(scope)), list(gain_settings(scope))
    variants = list(variant_settings(scope))
    shapes = list(product(scope.clusters, scope.short_counts))
    sources = sorted({source_of(setting) for setting in (*settings, *knowing)} | {source for *_, source in variants})
    rows = scope.steps * BATCH_SIZE
    with _Pool(scope.workers) as pool:
        say(f"{len(sources)} data sets of {rows} sequences")
        tables = dict(zip(sources, pool.map(make_table, [(source, rows) for source in sources]), strict=True))
        say(f"{len(settings)} cells and {len(variants)} variants")
        grid = pool.map(_cell, [(one, tables[source_of(one)], scope.steps) for one in settings])
        changed = pool.map(_cell, [(one, tables[source], scope.steps) for _, one, source in variants])
        say(f"{len(knowing)} plans with and without the encoder")
        gains = pool.map(_gain, [(one, tables[source_of(one)], scope.steps) for one in knowing])
        say("one long sequence among short ones")
        extremes = pool.map(_extreme, [(*shape, scope.seeds) for shape in shapes])
    say("scalability, in one process: it shows planning times")
    return Study(
        scope=scope,
        grid=grid,
        variants=[(what, cell) for (what, *_), cell in zip(variants, changed, strict=True)],
        gains=gains,
        scaling=list(_scaling(scope, say)),
        extremes=extremes,
    )


class _Pool:
    """Calls spread over processes; in this one if there is to be one only."""

    def __init__(self, workers: int) -> None:
        # Forked processes would inherit the threads of numpy and pyarrow.
        self._executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else None

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def map(self, function: Callable[..., _T], calls: Sequence[tuple[Any, ...]]) -> list[_T]:
        """The answers, in the order of the calls."""
        each = map if self._executor is None else self._executor.map
        return list(each(function, *zip(*calls, strict=True)))


def _cell(setting: Setting, table: LengthTable, steps: int) -> Cell:
    return run_cell(setting, table, steps=steps)


def _gain(setting: Setting, table: LengthTable, steps: int) -> EncoderGain:
    return run_encoder_gain(setting, table, steps=steps)


def grid_settings(scope: Scope) -> Iterator[Setting]:
    """Text, then trained and frozen encoders, on each cluster."""
    kinds: tuple[tuple[Encoder, Sequence[str], Sequence[str]], ...] = (
        ("text", scope.text_models, TEXT_DATASETS),
        ("trained", scope.vision_models, CLIP_DATASETS),
        ("frozen", scope.vision_models, CLIP_DATASETS),
    )
    for cluster, (encoder, models, datasets) in product(scope.clusters, kinds):
        for dataset, model in product(datasets, models):
            yield Setting(model=model, dataset=dataset, cluster=cluster, encoder=encoder)


def variant_settings(scope: Scope) -> Iterator[tuple[str, Setting, Source]]:
    """A text and a vision model with other token budgets, and with clips as the checkpoint ships."""
    cluster = scope.clusters[-1]
    text = scope.text_models[len(scope.text_models) // 2 - 1]
    kinds: tuple[tuple[Encoder, str, Sequence[str]], ...] = (
        ("text", text, TEXT_DATASETS),
        ("trained", scope.vision_models[-1], CLIP_DATASETS),
    )
    for encoder, model, datasets in kinds:
        for dataset in datasets:
            setting = Setting(model=model, dataset=dataset, cluster=cluster, encoder=encoder)
            for budget in scope.budgets:
                yield f"{budget:,}", replace(setting, tokens_per_rank=budget), source_of(setting)
            if encoder == "trained":
                yield f"{setting.tokens_per_rank:,}, clips as shipped", setting, (dataset, AS_SHIPPED)


def gain_settings(scope: Scope) -> Iterator[Setting]:
    """Every vision model and set of clips, and clips mixed with pictures and text."""
    encoders: tuple[Encoder, ...] = ("trained", "frozen")
    for encoder, dataset, model in product(encoders, (*CLIP_DATASETS, "mixed"), scope.vision_models):
        yield Setting(model=model, dataset=dataset, cluster=scope.clusters[-1], encoder=encoder)


def _extreme(cluster: str, short: int, seeds: int) -> Extreme:
    setting = Setting(model="qwen3-8b", dataset="extreme", cluster=cluster, encoder="text", batch_size=short + 1)
    cells = [run_cell(setting, extreme_table(short, seed=seed), steps=1) for seed in range(seeds)]
    seconds = {key: statistics.fmean(cell.outcomes[key].step_seconds for cell in cells) for key in cells[0].outcomes}
    return Extreme(cluster=cluster, short=short, seconds=seconds)


def _scaling(scope: Scope, say: Callable[[str], None]) -> Iterator[Cell]:
    """512 sequences up to 64 ranks, as the papers; then eight a rank. Nodes are added, their links stay as they are.

    All plan the same sequences, so that there are fewer steps with more ranks.
    """
    settings = [
        Setting(
            model=scope.vision_models[-1],
            dataset="openvid",
            cluster=scope.clusters[-1],
            encoder="trained",
            ranks=ranks,
            batch_size=_PER_RANK * max(ranks, RANKS),
        )
        for ranks in scope.scale_ranks
    ]
    rows = max(setting.batch_size for setting in settings)
    table = make_table(source_of(settings[0]), rows)
    for setting in settings:
        say(f"  {setting.ranks} ranks")
        strategies = [name for name in STRATEGIES if name != PAPER or setting.ranks <= scope.paper_ranks]
        yield run_cell(setting, table, steps=min(scope.steps, rows // setting.batch_size), strategies=strategies)


def geometric_mean(cells: Iterable[Cell], sync: Sync, *, over: str, of: str = OURS) -> float:
    """Of speed-ups."""
    return statistics.geometric_mean(cell.speedup(sync, over=over, of=of) for cell in cells)
