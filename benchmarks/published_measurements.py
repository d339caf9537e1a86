"""The cost model on inputs that others printed, predicted beside measured: docs/research/measured-by-others.md.

    python -m benchmarks.published_measurements

No coefficient is fitted here: models and clusters are described by their figures, and their profiles computed as `fcp
profile --analytic` does. What a source leaves open is assumed, and said in its row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.study.published import DHP_CLUSTER, FCP_CLUSTER
from benchmarks.study.runs import PAPER, STATIC, batches_of, run_cell
from benchmarks.study.workload import CLIP_DATASETS, Setting, make_table, source_of
from fcp_cli.cost.model import group_seconds, sequence_work
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import ModelSpec
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.analytic import analytic_profile
from fcp_cli.recipe import Recipe

_STEPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A figure that somebody measured, beside the prediction for the same inputs.

    Attributes:
        source: where it is printed.
        what: the figure with its unit.
        predicted, measured: in that unit.
    """

    source: str
    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted / self.measured - 1.0

    def line(self) -> str:
        """Return the row of the table."""
        return f"| {self.source} | {self.what} | {self.predicted:.3g} | {self.measured:.3g} | {self.error:+.0%} |"


MEGATRON = "Megatron-LM, examples/dynamic_context_parallel"
# GPUs -> trimmed mean of the baseline and of dynamic CP, in ms.
_MEGATRON_MS = {
    4: (195.269, 151.906),
    8: (220.119, 155.850),
    16: (226.775, 187.125),
    32: (286.206, 208.088),
    64: (271.988, 181.912),
}
_MEGATRON_DEGREE = 4
_MEGATRON_MODEL = ModelSpec(
    name="megatron-dcp-example",
    architecture="llama",
    num_layers=12,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_size=8192 * 2 // 3,  # two matrices there, three in the figures here
    vocab_size=131_072,
    tied_embeddings=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DpBalanced:
    """Megatron's `dp_balanced` scheduler, as its code says and its page does not.

    A pack takes sequences in their order and is closed by the first that does not fit; then last sequences leave their
    packs for packs of their own until there are as many for each group.
    """

    problem: Problem
    degree: int
    name: str = "dp-balanced"
    options: Mapping[str, Any] = field(default_factory=dict)

    def assign(self, batch: Batch) -> Assignment:
        """Run pack i on the contiguous group i modulo the groups."""
        groups = self.problem.num_ranks // self.degree
        packs = in_order(batch.lengths.tolist(), most_tokens=self.degree * self.problem.tokens_per_rank, groups=groups)
        firsts = self.degree * (np.arange(len(packs)) % groups)
        return Assignment(
            wave=np.full(len(packs), -1, dtype=np.int32),
            rank_offsets=self.degree * np.arange(len(packs) + 1),
            ranks=(firsts[:, None] + np.arange(self.degree)).ravel().astype(np.int32),
            member_offsets=np.cumsum([0, *map(len, packs)]),
            members=np.concatenate([np.array(pack, dtype=np.int64) for pack in packs]),
        )


def in_order(lengths: Sequence[int], *, most_tokens: int, groups: int) -> list[list[int]]:
    """Return the packs of `DpBalanced`, as positions."""
    packs: list[list[int]] = [[]]
    tokens = 0
    for position, length in enumerate(lengths):
        if tokens + length > most_tokens:
            packs.append([])
            tokens = 0
        packs[-1].append(position)
        tokens += length
    at = len(packs) - 1
    for _ in range(-len(packs) % groups):
        while len(packs[at]) == 1:
            at -= 1
        packs.append([packs[at].pop()])
    return packs


def megatron_rows() -> Iterator[Row]:
    """`default_dynamic_cp` against fixed CP 4: lognormal 128 to 8,192, mean 1,024, sigma 1.5; 8 sequences per 4 GPUs.

    Assumed: H100s, since the page does not say which GPUs, of which a node has four.
    """
    cluster = replace(load_cluster("h100-8x8"), devices_per_node=4)
    draw = np.random.default_rng(0)
    for gpus, (fixed_ms, dynamic_ms) in _MEGATRON_MS.items():
        lognormal = draw.lognormal(math.log(1024) - 1.5**2 / 2, 1.5, _STEPS * 2 * gpus)
        table = LengthTable(name="mock", length_tokens=lognormal.clip(128, 8192).astype(np.int64))
        profile = analytic_profile(_MEGATRON_MODEL, cluster, recipe=Recipe(zero_stage=0), sync="iteration", ranks=gpus)
        problem = Problem(num_ranks=gpus, ranks_per_node=4, tokens_per_rank=2048, sync="iteration", profile=profile)
        settings = BatchSettings(global_batch_size=2 * gpus, shuffle=False)
        batches = GlobalBatches(table, problem, settings)
        fixed = _mean_seconds(batches, DpBalanced(problem=problem, degree=_MEGATRON_DEGREE))
        dynamic = _mean_seconds(batches, make_solver("megatron-packing", batches))
        where = f"{gpus} GPUs: "
        yield Row(source=MEGATRON, what=f"{where}speed-up", predicted=fixed / dynamic, measured=fixed_ms / dynamic_ms)
        yield Row(source=MEGATRON, what=f"{where}fixed, ms", predicted=1e3 * fixed, measured=fixed_ms)
        yield Row(source=MEGATRON, what=f"{where}dynamic, ms", predicted=1e3 * dynamic, measured=dynamic_ms)


def _mean_seconds(batches: GlobalBatches, solver: Solver) -> float:
    steps = (assemble(solver.assign(batch), batch, batches.problem, bound_seconds=0.0) for batch in batches)
    return statistics.fmean(step.makespan_seconds for step in steps)


PRIME_RL = "PrimeIntellect-ai/prime-rl#2418"
# The language model's 12e9 parameters that a token meets, as a dense model of the same attention.
_GLM_AIR = ModelSpec(
    name="glm-4.5-air",
    architecture="llama",
    num_layers=46,
    hidden_size=4096,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=10_240,
    vocab_size=151_552,
    tied_embeddings=False,
)


def prime_rl_rows() -> Iterator[Row]:
    """A ring of two and of four against none: GLM-4.5-Air, 65,536 tokens a sequence, eight H200s."""
    cluster = load_cluster("h200-8x8")
    recipe = Recipe(zero_stage=3, recompute="full")
    profile = analytic_profile(_GLM_AIR, cluster, recipe=recipe, sync="microbatch", ranks=8)
    work = sequence_work(LengthTable(name="one", length_tokens=np.array([65_536])), profile)
    alone, *rings = (
        degree
        * float(
            group_seconds(
                profile,
                work,
                degree=degree,
                crosses_nodes=False,
            )[0]
        )
        for degree in (1, 2, 4)
    )
    for degree, seconds, measured in zip((2, 4), rings, (60 / 84, 57 / 84), strict=True):
        what = f"ring of {degree}: tokens/s over those of none"
        yield Row(source=PRIME_RL, what=what, predicted=alone / seconds, measured=measured)


FCP, DHP = "arXiv:2602.21788v2, tables 1 and 2", "DHP's first version, tables 1 and 2"
# Ranks and global batch size -> seconds of a step: of Qwen3-VL-2B on 910C; of DHP's computation, on 8 nodes of 8 910B.
_FCP_SECONDS = {(64, 512): 11.65, (64, 256): 7.58, (64, 128): 6.34, (32, 512): 18.26, (16, 512): 34.45}
_DHP_SECONDS = {(64, 512): 7.32, (64, 256): 3.77, (64, 128): 2.04, (32, 512): 13.58, (16, 512): 25.77}


def fcp_rows() -> Iterator[Row]:
    """Steps by the papers' own strategy, batch 512 on 64 devices, and others as shares of them.

    Assumed: the encoder is trained. The tables do not say on which of three sets of clips: all are predicted. DHP's
    name no model either: Qwen3-VL-2B is assumed, as in FCP's.
    """
    for source, cluster, seconds in ((FCP, FCP_CLUSTER, _FCP_SECONDS), (DHP, DHP_CLUSTER, _DHP_SECONDS)):
        for dataset in CLIP_DATASETS:
            yield from _clip_rows(source, cluster, dataset, seconds)


def _clip_rows(source: str, cluster: str, dataset: str, measured: Mapping[tuple[int, int], float]) -> Iterator[Row]:
    settings = {
        (ranks, batch): _clips("qwen3-vl-2b", dataset, cluster=cluster, ranks=ranks, batch=batch)
        for ranks, batch in measured
    }
    table = make_table(source_of(settings[64, 512]), 512)
    found: dict[tuple[int, int], float] = {}
    for key, setting in settings.items():
        cell = run_cell(setting, table, steps=1, strategies=(PAPER,))
        found[key] = cell.outcomes[PAPER, "microbatch"].step_seconds
    whole, *parts = found
    yield Row(source=source, what=f"{dataset}: s a step", predicted=found[whole], measured=measured[whole])
    for ranks, batch in parts:
        predicted, of_whole = (seconds[ranks, batch] / seconds[whole] for seconds in (found, measured))
        what = f"{dataset}, {ranks} ranks, batch {batch}: of that"
        yield Row(source=source, what=what, predicted=predicted, measured=of_whole)


SCALING = "arXiv:2602.21788v2, figure 5"


def scaling_rows() -> Iterator[Row]:
    """What a static strategy keeps of its throughput a device from 8 to 64 devices: 1.7 k of 2.0 k tokens/s.

    Assumed: Qwen3-VL-8B on OpenVid with its encoder trained; the figure names no model.
    """
    table = make_table(source_of(_clips("qwen3-vl-8b", "openvid", ranks=64, batch=512)), 512)
    rates = []
    for ranks in (8, 64):
        setting = _clips("qwen3-vl-8b", "openvid", ranks=ranks, batch=512)
        tokens = sum(int(batch.work.tokens.sum()) for batch in batches_of(setting, table, "microbatch", steps=1))
        cell = run_cell(setting, table, steps=1, strategies=(STATIC,))
        rates.append(tokens / ranks / cell.outcomes[STATIC, "microbatch"].step_seconds)
    what = "tokens/s a rank on 64 over those on 8, static"
    yield Row(source=SCALING, what=what, predicted=rates[1] / rates[0], measured=1.7 / 2.0)


def _clips(model: str, dataset: str, *, cluster: str = FCP_CLUSTER, ranks: int, batch: int) -> Setting:
    return Setting(model=model, dataset=dataset, cluster=cluster, encoder="trained", ranks=ranks, batch_size=batch)


PARTS: tuple[Callable[[], Iterator[Row]], ...] = (megatron_rows, prime_rl_rows, fcp_rows, scaling_rows)


def main() -> None:
    """Print one table in Markdown."""
    print("| source | figure | predicted | measured | error |")
    print("|---|---|---:|---:|---:|")
    for part in PARTS:
        for row in part():
            print(row.line(), flush=True)


if __name__ == "__main__":
    main()
