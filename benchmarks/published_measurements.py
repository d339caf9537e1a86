"""The cost model on inputs that others printed, predicted beside measured: docs/research/measured-by-others.md.

    python -m benchmarks.published_measurements

Nothing is fitted here: models and clusters are described by their figures, and their profiles computed as `fcp profile
--analytic` does. Rows from which a figure of a shipped cluster or of a stack was taken say `chose`, and rows whose
source omits inputs that decide them `open`; the others test. What a source leaves open is assumed, and said there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from benchmarks.study.published import DHP_CLUSTER, FCP_CLUSTER
from benchmarks.study.runs import PAPER, STATIC, batches_of, run_cell
from benchmarks.study.workload import CLIP_DATASETS, Setting, make_table, source_of
from fcp_cli.cost.model import causal_work, group_seconds, sequence_work
from fcp_cli.cost.recipe import KernelName, Recipe, Recompute
from fcp_cli.manifest.table import LengthTable
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import Cut
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile

_STEPS = 20
Role: TypeAlias = Literal["chose", "tests", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A figure that somebody measured, beside the prediction for the same inputs.

    Attributes:
        source: where it is printed.
        what: the figure with its unit.
        predicted, measured: in that unit.
        role: `chose` if a figure of a shipped cluster or of a stack was taken from it; `open` if the source omits
            inputs that decide it; else `tests`.
    """

    source: str
    what: str
    predicted: float
    measured: float
    role: Role = "tests"

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted / self.measured - 1.0

    def line(self) -> str:
        """Return the row of the table."""
        figures = f"{self.predicted:.3g} | {self.measured:.3g} | {self.error:+.0%}"
        return f"| {self.source} | {self.what} | {figures} | {self.role} |"


LONG = "huggingface/trl#6845, trl#6846, transformers#48324"
_QWEN3_0_6B = ModelSpec(
    name="qwen3-0.6b",
    architecture="qwen3",
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=3072,
    vocab_size=151_936,
    tied_embeddings=True,
    qk_norm=True,
)
_MEBI = 1 << 20
# Model, kernel, tokens, devices -> seconds of a step.
_LONG_SECONDS: Final[Mapping[tuple[str, KernelName, int, int], tuple[float, ...]]] = {
    ("qwen3-8b", "cudnn", _MEBI, 8): (373.0, 380.0),
    ("qwen3-8b", "fa2", _MEBI, 8): (606.0,),
    ("qwen3-8b", "cudnn", 2 * _MEBI, 16): (696.0,),
    ("qwen3-8b", "cudnn", 4 * _MEBI, 32): (1346.0,),
    ("qwen3-30b-a3b", "cudnn", _MEBI, 8): (483.0,),
    ("qwen3-32b", "cudnn", _MEBI, 8): (1295.0,),
    ("qwen3-0.6b", "cudnn", _MEBI, 8): (137.0,),
}


def long_rows() -> Iterator[Row]:
    """One sequence on one ring of all devices: H100s, 8 a node, full recomputation, PyTorch's context parallelism."""
    for (model, kernel, tokens, devices), seconds in _LONG_SECONDS.items():
        spec = _QWEN3_0_6B if model == _QWEN3_0_6B.name else load_model(model)
        recipe = Recipe(zero_stage=3, recompute="full")
        profile = analytic_profile(
            spec, load_cluster("h100").running(kernel), recipe=recipe, sync="microbatch", ranks=devices
        )
        work = sequence_work(LengthTable(name="one", length_tokens=np.array([tokens])), profile)
        predicted = float(group_seconds(profile, work, degree=devices, crosses_nodes=devices > 8)[0])
        for measured in seconds:
            what = f"{model}, {tokens // _MEBI} Mi tokens on {devices}, {kernel}: s a step"
            yield Row(source=LONG, what=what, predicted=predicted, measured=measured)


FA3 = "arXiv:2407.08608, figures 5 and 6"
# Kernel -> TFLOP/s on an H100 of packs of 16k tokens, head size 128: causal forward of sequences of 512 to 16k tokens.
_FA3_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
_FA3_FORWARD: Final[Mapping[KernelName, tuple[int, ...]]] = {
    "cudnn": (315, 410, 484, 518, 529, 539),
    "fa3": (292, 423, 521, 579, 602, 616),
    "fa2": (191, 260, 298, 319, 333, 335),
}
DISTCA = "hao-ai-lab/distca 039f2e4, distca/profiling/data"
# Tokens of one causal sequence -> ms of FlashAttention 2's forward on an H100, 64 heads of 128.
_DISTCA_MS = {1024: 0.1327, 4096: 1.0551, 8192: 3.7067, 16_384: 13.5033, 32_768: 51.8939, 65_536: 206.2866}


def kernel_rows() -> Iterator[Row]:
    """Kernels alone, forward: packs of equal lengths, of which the longest and shortest chose rates; one sequence."""
    h100 = load_cluster("h100")
    for kernel, rates in _FA3_FORWARD.items():
        rate = h100.attention[kernel]
        for length, measured in zip(_FA3_LENGTHS, rates, strict=True):
            predicted = h100.peak_flops * rate.forward * length / (length + rate.token_pairs) / 1e12
            what = f"{kernel}, packs of {length:,} tokens: TFLOP/s"
            yield Row(source=FA3, what=what, predicted=predicted, measured=measured, role="chose")
    rate = h100.attention["fa2"]
    for length, milliseconds in _DISTCA_MS.items():
        operations = 2.0 * 64 * 128 * length * (length + rate.token_pairs)
        predicted = 1e3 * operations / (h100.peak_flops * rate.forward)
        yield Row(
            source=DISTCA, what=f"one sequence of {length:,} tokens: ms", predicted=predicted, measured=milliseconds
        )


RING_FLASH = "zhuzilin/ring-flash-attention 01c8baf, README"
# Cluster -> iterations a second, forward and backward: an eighth of the work on one device; on a ring of eight.
_RING_FLASH = {"h100": (19.3, 17.4), "a100": (11.8, 10.6)}
_LLAMA_LAYER = ModelSpec(
    name="one layer of Llama-3.1-8B's heads",
    architecture="llama",
    num_layers=1,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14_336,
    vocab_size=128_256,
    tied_embeddings=False,
)


def ring_rows() -> Iterator[Row]:
    """A zig-zag ring of eight against the same kernels without one: 65,536 tokens, one layer's attention alone.

    Its H800 is an H100 whose NVLink is 4/9 as wide.
    """
    for cluster, (alone, ring) in _RING_FLASH.items():
        found = load_cluster(cluster).running("fa2")
        if cluster == "h100":
            found = replace(found, intra_node_bytes_per_second=found.intra_node_bytes_per_second * 4 / 9)
        profile = analytic_profile(_LLAMA_LAYER, found, recipe=Recipe(), sync="iteration", ranks=8)
        c = replace(profile.coefficients, linear_seconds_per_token=0.0, microbatch_seconds=0.0)
        work = causal_work(np.array([65_536]), c)
        seconds = float(group_seconds(replace(profile, coefficients=c), work, degree=8, crosses_nodes=False)[0])
        kernels = float(work.attention_seconds[0]) / 8
        device = "H800" if cluster == "h100" else "A100"
        what = f"{device}, an eighth of the work: iterations/s"
        yield Row(source=RING_FLASH, what=what, predicted=1 / kernels, measured=alone, role="chose")
        what = f"{device}, ring of 8 over that: iterations/s"
        yield Row(source=RING_FLASH, what=what, predicted=kernels / seconds, measured=ring / alone)


SIMUMAX = "MooreThreads/SimuMax 4dcaae5, docs/b200"
_LLAMA_LAYERS = {"llama3-70b": 12, "llama3-405b": 4}
# Model, TP, PP, DP, CP, tokens of a sequence -> GiB that a B200 held at most; Megatron-LM, a sequence a micro-batch.
_SIMUMAX_GIB = {
    ("llama3-70b", 1, 2, 4, 1, 4096): 66.55,
    ("llama3-70b", 2, 1, 4, 1, 4096): 60.68,
    ("llama3-70b", 4, 1, 2, 1, 4096): 39.07,
    ("llama3-70b", 8, 1, 1, 1, 4096): 28.29,
    ("llama3-405b", 1, 2, 4, 1, 4096): 87.08,
    ("llama3-405b", 2, 1, 4, 1, 4096): 81.59,
    ("llama3-405b", 4, 1, 2, 1, 4096): 52.89,
    ("llama3-405b", 8, 1, 1, 1, 4096): 38.57,
    ("llama3-70b", 2, 1, 1, 4, 32_768): 68.43,
    ("llama3-70b", 1, 1, 1, 8, 32_768): 104.51,
    ("llama3-405b", 2, 1, 1, 4, 32_768): 87.03,
    ("llama3-405b", 1, 1, 1, 8, 32_768): 139.22,
    ("llama3-70b", 2, 1, 1, 4, 131_072): 112.67,
    ("llama3-70b", 1, 1, 1, 8, 131_072): 147.99,
    ("llama3-405b", 2, 1, 1, 4, 131_072): 118.13,
}
# Model, PP, CP, tokens of a sequence, micro-batches -> ms of a step, without tensor parallelism.
_SIMUMAX_MS = {
    ("llama3-70b", 2, 1, 4096, 4): 843.0,
    ("llama3-70b", 2, 1, 4096, 8): 1476.8,
    ("llama3-70b", 2, 1, 4096, 32): 5436.5,
    ("llama3-405b", 2, 1, 4096, 4): 1074.6,
    ("llama3-405b", 2, 1, 4096, 8): 1935.4,
    ("llama3-405b", 2, 1, 4096, 32): 7046.4,
    ("llama3-70b", 1, 8, 32_768, 4): 1768.1,
    ("llama3-70b", 1, 8, 131_072, 4): 11_301.9,
    ("llama3-405b", 1, 8, 32_768, 4): 2003.6,
}
_SIMUMAX_CHOSE = (("llama3-70b", 2, 1, 4096, 4), ("llama3-70b", 2, 1, 4096, 32))


def simumax_rows() -> Iterator[Row]:
    """Memory and time of Llama 3 with few layers on eight B200s; nothing recomputed, distributed optimizer."""
    recipe = Recipe(zero_stage=1)
    for (model, tensor, pipeline, data, context, length), measured in _SIMUMAX_GIB.items():
        cut, ranks = Cut(tensor_parallel=tensor, pipeline_parallel=pipeline), data * context
        held = rank_memory(_llama(model), recipe if ranks > 1 else Recipe(), sync="iteration", ranks=ranks, cut=cut)
        what = (
            f"{model}, {_LLAMA_LAYERS[model]} layers, TP {tensor}, PP {pipeline}, CP {context}, {length:,} tokens: GiB"
        )
        predicted = held.total_bytes(length // context) / (1 << 30)
        yield Row(source=SIMUMAX, what=what, predicted=predicted, measured=measured)
    for key, measured in _SIMUMAX_MS.items():
        model, pipeline, context, length, micro_batches = key
        cut, ranks = Cut(pipeline_parallel=pipeline), 8 // pipeline
        profile = analytic_profile(
            _llama(model), load_cluster("b200"), recipe=recipe, sync="iteration", ranks=ranks, cut=cut
        )
        work = causal_work(np.array([length]), profile.coefficients)
        one = float(group_seconds(profile, work, degree=context, crosses_nodes=False)[0])
        bubble = (micro_batches + pipeline - 1) / micro_batches
        predicted = 1e3 * (micro_batches * one * bubble + profile.step.closing_seconds("iteration"))
        what = f"{model}, PP {pipeline}, CP {context}, {micro_batches} x {length:,} tokens: ms"
        role: Role = "chose" if key in _SIMUMAX_CHOSE else "tests"
        yield Row(source=SIMUMAX, what=what, predicted=predicted, measured=measured, role=role)


def _llama(model: str) -> ModelSpec:
    spec = replace(load_model("llama3-70b"), name=model, num_layers=_LLAMA_LAYERS[model])
    return replace(spec, hidden_size=16_384, num_heads=128, ffn_size=53_248) if model == "llama3-405b" else spec


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
        for what, predicted, measured in (
            ("speed-up", fixed / dynamic, fixed_ms / dynamic_ms),
            ("fixed, ms", 1e3 * fixed, fixed_ms),
            ("dynamic, ms", 1e3 * dynamic, dynamic_ms),
        ):
            yield Row(source=MEGATRON, what=where + what, predicted=predicted, measured=measured, role="open")


def _mean_seconds(batches: GlobalBatches, solver: Solver) -> float:
    steps = (assemble(solver.assign(batch), batch, batches.problem, bound_seconds=0.0) for batch in batches)
    return statistics.fmean(step.makespan_seconds for step in steps)


TORCHTITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412"
# Stack -> share of the peak that its matrices reach, with norms and activations; tokens/s a GPU on 8 GPUs, which chose
# it, and on 128. FlashAttention 2, every second product recomputed: as fcp's level "elementwise" in time and bytes.
_TORCHTITAN = {"FSDP2, eager": (0.33, 5762, 5605), "FSDP2, torch.compile": (0.395, 6667, 6514)}
_TORCHTITAN_GIB = {8: (82.4, 77.0), 128: (67.0, 62.0)}
# In fp8, all recomputed: CP -> tokens/s a GPU of a sequence of 32,768 tokens a GPU; the first chose the share.
_TORCHTITAN_FP8, _TORCHTITAN_CP = 0.46, {1: 3890, 2: 2540, 4: 1071, 8: 548}


def torchtitan_rows() -> Iterator[Row]:
    """Llama 3.1 8B on H100s of 500 W: two sequences of 8,192 tokens a GPU, and one of up to 262,144 on a ring.

    Rings of four and eight are open: by PyTorch's code each rank more adds the same kernels to each of them, and in the
    source's rows they take twice as long as in the ring of two.
    """
    for stack, (efficiency, *rates) in _TORCHTITAN.items():
        for gpus, measured in zip(_TORCHTITAN_GIB, rates, strict=True):
            predicted = _tokens_per_second("elementwise", efficiency, gpus, lengths=(8192, 8192), degree=1)
            role: Role = "chose" if gpus == 8 else "tests"
            what = f"{stack}, {gpus} GPUs: tokens/s a GPU"
            yield Row(source=TORCHTITAN, what=what, predicted=predicted, measured=measured, role=role)
    for gpus, gib in _TORCHTITAN_GIB.items():
        recipe = Recipe(zero_stage=3, recompute="elementwise")
        held = rank_memory(load_model("llama3-8b"), recipe, sync="microbatch", ranks=gpus).total_bytes(16_384)
        for stack, most in zip(_TORCHTITAN, gib, strict=True):
            what = f"{stack}, {gpus} GPUs: GiB"
            yield Row(source=TORCHTITAN, what=what, predicted=held / (1 << 30), measured=most)
    for degree, measured in _TORCHTITAN_CP.items():
        lengths = (32_768 * degree,)
        predicted = _tokens_per_second("full", _TORCHTITAN_FP8, 8, lengths=lengths, degree=degree)
        what = f"float8, torch.compile, {lengths[0]:,} tokens, CP {degree}: tokens/s a GPU"
        role = "chose" if degree == 1 else "tests" if degree == 2 else "open"
        yield Row(source=TORCHTITAN, what=what, predicted=predicted, measured=measured, role=role)


def _tokens_per_second(
    recompute: Recompute, efficiency: float, gpus: int, *, lengths: tuple[int, ...], degree: int
) -> float:
    cluster = replace(load_cluster("h100").running("fa2"), linear_efficiency=efficiency)
    recipe = Recipe(zero_stage=3, recompute=recompute)
    profile = analytic_profile(load_model("llama3-8b"), cluster, recipe=recipe, sync="microbatch", ranks=gpus)
    pack = causal_work(np.array(lengths), profile.coefficients).packed(np.array([0]))
    seconds = float(group_seconds(profile, pack, degree=degree, crosses_nodes=False)[0])
    wave = max(seconds, profile.step.floor_seconds("microbatch")) + profile.step.closing_seconds("microbatch")
    return sum(lengths) / degree / wave


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
    """What prime-rl calls a ring, of two and four against none: GLM-4.5-Air, 65,536 tokens a sequence, eight H200s.

    Its code (trainer/models/layers/attn.py, utils/cp.py) cuts a sequence into d parts in their order, gathers the keys
    and values of a head while it computes the head before, and runs FlashAttention 3 on the keys so far: the last rank
    computes 2 d - 1 of the d^2 halves of squares. Its reduce-scatter of gradients, 0.02 s of 6, is left out.
    """
    cluster, recipe = load_cluster("h200-8x8").running("fa3"), Recipe(zero_stage=3, recompute="full")
    profile = analytic_profile(_GLM_AIR, cluster, recipe=recipe, sync="microbatch", ranks=8)
    work = sequence_work(LengthTable(name="one", length_tokens=np.array([65_536])), profile)
    linear, attention = float(work.linear_seconds[0]), float(work.attention_seconds[0])
    for degree, measured in ((2, 60 / 84), (4, 57 / 84)):
        predicted = (linear + attention) / (linear + attention * (2 * degree - 1) / degree)
        what = f"parts of {degree}, keys gathered: tokens/s over those of none"
        yield Row(source=PRIME_RL, what=what, predicted=predicted, measured=measured)


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
    seconds = found[whole]
    yield Row(source=source, what=f"{dataset}: s a step", predicted=seconds, measured=measured[whole], role="open")
    for ranks, batch in parts:
        predicted, of_whole = (seconds[ranks, batch] / seconds[whole] for seconds in (found, measured))
        what = f"{dataset}, {ranks} ranks, batch {batch}: of that"
        yield Row(source=source, what=what, predicted=predicted, measured=of_whole, role="open")


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
    yield Row(source=SCALING, what=what, predicted=rates[1] / rates[0], measured=1.7 / 2.0, role="open")


def _clips(model: str, dataset: str, *, cluster: str = FCP_CLUSTER, ranks: int, batch: int) -> Setting:
    return Setting(model=model, dataset=dataset, cluster=cluster, encoder="trained", ranks=ranks, batch_size=batch)


PARTS: tuple[Callable[[], Iterator[Row]], ...] = (
    long_rows,
    kernel_rows,
    ring_rows,
    simumax_rows,
    torchtitan_rows,
    megatron_rows,
    prime_rl_rows,
    fcp_rows,
    scaling_rows,
)


def main() -> None:
    """Print one table in Markdown."""
    print("| source | figure | predicted | measured | error | role |")
    print("|---|---|---:|---:|---:|---|")
    errors: list[float] = []
    for part in PARTS:
        for row in part():
            print(row.line(), flush=True)
            errors += [abs(row.error)] if row.role == "tests" else []
    within, beyond = (sum(error <= most for error in errors) for most in (0.15, 0.3))
    print(
        f"\n{len(errors)} rows test: median error {statistics.median(errors):.1%}, {within / len(errors):.0%} within "
        f"15 %, {len(errors) - beyond} beyond 30 %"
    )


if __name__ == "__main__":
    main()
