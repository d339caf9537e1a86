"""Every strategy on fourteen sets of lengths, ten of which others measured or published, on three clusters.

    python -m benchmarks.real_lengths --manifests wlb_llm_lengths.parquet linux_source.parquet

One step of 512 sequences of each set, Qwen3-8B on 64 ranks, two budgets, both syncs. Prints, by strategy, the step time
over fcp's (geometric mean, least, most), then every case in which a strategy is quicker than fcp by more than half a
percent. `--gaps` plans with fcp alone, and prints its gap to the proven bound in every case. Sequences are cut at
131,072 tokens. Nothing of a trace is stored here but its percentiles.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.split_heads import profile_of
from benchmarks.workloads import FAMILIES, HELD_OUT, MAX_LENGTH, lengths, media_manifest, real_table
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.compare import compare
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import compared_names
from fcp_cli.util.arrays import FloatArray, IntArray

CLUSTERS = ("h100-8x8", "h200-8x8", "ascend910b-8x8")
_BYTES_PER_TOKEN = 3.5  # assumed, as for the manifest of Linux

PERCENTILES = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 100.0)
# Tokens of prompt and answer at `PERCENTILES`. Azure: AzureLLMInferenceTrace_code.csv and _conv.csv of 2023 together,
# 28,185 requests, Azure/AzurePublicDataset at b469a113 (CC-BY-4.0). Mooncake: FAST25-release's
# conversation_trace.jsonl, 12,031 requests, kvcache-ai/Mooncake at 3b5a5941 (Apache-2.0).
TRACES: Mapping[str, Sequence[int]] = {
    "azure": (12, 72, 194, 325, 495, 1417, 1780, 4106, 4242, 7445, 7495, 14_089),
    "mooncake": (895, 927, 1120, 1343, 2692, 7255, 15_657, 27_723, 40_048, 85_834, 121_304, 126_527),
}
# Longest length in tokens to documents: doc_length_distribution.csv of SandAI-org/MagiAttention at 2c641357, from which
# its benchmarks draw (Apache-2.0); 13.5 M documents.
DOCUMENTS: Mapping[int, int] = {
    10: 30_254, 50: 391_188, 100: 699_596, 200: 1_377_757, 500: 3_794_735, 1024: 3_316_785, 2048: 2_106_566,
    4096: 988_525, 8192: 410_002, 16_384: 173_574, 32_768: 115_007, 65_536: 18_428, 131_072: 22_513, 196_608: 18_284,
}  # fmt: skip
# Seconds of video to rows of LLaVA-Video-178K's subsets of that duration, questions and captions, as its page on
# Hugging Face counted them in 2025, without ActivityNet's, whose counts it did not show (Apache-2.0, for research and
# education; no row is used).
LLAVA_VIDEO: Mapping[tuple[float, float], int] = {
    (1, 30): 617_990, (30, 60): 274_118, (60, 120): 246_530, (120, 180): 234_313
}  # fmt: skip


def of_trace(name: str, generator: np.random.Generator, n: int) -> FloatArray:
    """Draw from a trace, evenly between its percentiles."""
    return np.interp(100.0 * generator.random(n), PERCENTILES, TRACES[name])


def of_documents(generator: np.random.Generator, n: int) -> FloatArray:
    """Draw from the histogram, evenly on a logarithmic scale within each of its spans."""
    edges, counts = np.array([1, *DOCUMENTS], dtype=np.float64), np.array(list(DOCUMENTS.values()), dtype=np.float64)
    span = generator.choice(len(counts), n, p=counts / counts.sum())
    return np.asarray(np.exp(generator.uniform(np.log(edges[span]), np.log(edges[span + 1]))))


def of_arxiv(generator: np.random.Generator, n: int) -> FloatArray:
    """Draw around the mean of the Pile's ArXiv, 46.61 KiB (Gao et al. 2020, Table 1); the width is assumed."""
    sigma = 0.8
    mean = 46.61 * 1024 / _BYTES_PER_TOKEN
    return generator.lognormal(math.log(mean) - sigma**2 / 2, sigma, n)


def of_wikitext(generator: np.random.Generator, n: int) -> FloatArray:
    """Draw around the mean of WikiText-103's articles: 103,227,021 tokens of 28,475 (Merity et al. 2016; CC-BY-SA).

    Its tokens are words; the width, and that a word is one token, are assumed.
    """
    sigma = 0.7
    return generator.lognormal(math.log(103_227_021 / 28_475) - sigma**2 / 2, sigma, n)


def of_llava_video(generator: np.random.Generator, n: int) -> FloatArray:
    """Draw rows of LLaVA-Video-178K, evenly within each span of seconds.

    A frame a second of 13 x 13 tokens, as its paper samples and its model pools them; 200 tokens of text are assumed.
    """
    spans, rows = np.array(list(LLAVA_VIDEO)), np.array(list(LLAVA_VIDEO.values()), dtype=np.float64)
    span = generator.choice(len(rows), n, p=rows / rows.sum())
    return np.asarray(169 * np.ceil(generator.uniform(spans[span, 0], spans[span, 1])) + 200)


def of_longalign(generator: np.random.Generator, n: int) -> FloatArray:
    """Draw LongAlign's mix: a tenth are its 10k instructions of 8k to 64k tokens (Bai et al. 2024), the rest chats.

    The share, the logarithmic scale within 8k to 64k and the chats' lengths (median 900 tokens) are assumed.
    """
    long = np.exp(generator.uniform(math.log(8192), math.log(65_536), n))
    return np.where(generator.random(n) < 0.1, long, generator.lognormal(math.log(900), 0.9, n))


def of_clips(generator: np.random.Generator, n: int) -> FloatArray:
    """Draw records of MSR-VTT, InternVid, OpenVid, images and text, the mixed set of `benchmarks.clips`."""
    manifest = media_manifest("mixed", "qwen3-vl", n, seed=int(generator.integers(1 << 30)))
    return real_table(manifest).length_tokens.astype(np.float64)


PUBLISHED: Mapping[str, Callable[[np.random.Generator, int], FloatArray]] = {
    "documents": of_documents,
    "arxiv": of_arxiv,
    "wikitext": of_wikitext,
    "longalign": of_longalign,
    "azure": lambda generator, n: of_trace("azure", generator, n),
    "mooncake": lambda generator, n: of_trace("mooncake", generator, n),
    "clips": of_clips,
    "llava-video": of_llava_video,
}


def drawn(name: str, *, sequences: int, manifests: Mapping[str, Path], repeats: bool = False) -> IntArray:
    """[sequences] lengths in tokens of one set; `repeats`: a manifest's may be drawn more than once."""
    generator = np.random.default_rng(0)
    if name in (*FAMILIES, *HELD_OUT):
        return lengths(name, sequences=sequences, seed=0)
    if name in manifests:
        own = real_table(manifests[name]).length_tokens.astype(np.float64)
        found = generator.choice(own, sequences, replace=repeats)
    else:
        found = PUBLISHED[name](generator, sequences)
    return np.asarray(np.clip(np.ceil(found), 1, MAX_LENGTH), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One strategy on one step that it does not refuse."""

    cluster: str
    tokens_per_rank: int
    sync: Sync
    lengths: str
    strategy: str
    seconds: float
    gap: float


def cells(
    names: Sequence[str], sets: Mapping[str, IntArray], *, clusters: Sequence[str], budgets: Sequence[int]
) -> Iterator[Cell]:
    """Compare on every set, budget, sync and cluster."""
    settings = BatchSettings(global_batch_size=len(next(iter(sets.values()))), shuffle=False)
    for cluster in clusters:
        profile = profile_of("qwen3-8b", cluster)
        for budget in budgets:
            problem = Problem(num_ranks=64, ranks_per_node=8, tokens_per_rank=budget, sync="iteration", profile=profile)
            for name, tokens in sets.items():
                table = LengthTable(name=name, length_tokens=tokens)
                for one in compare(table, problem, settings, names=names, milp_seconds=1.0):
                    for sync, outcome in one.outcomes.items():
                        yield Cell(
                            cluster=cluster,
                            tokens_per_rank=budget,
                            sync=sync,
                            lengths=name,
                            strategy=one.name,
                            seconds=outcome.step_seconds,
                            gap=outcome.gap,
                        )


def ratios(found: Sequence[Cell]) -> dict[Cell, float]:
    """Return each cell's seconds over those of fcp in its place."""
    fcp = {(c.cluster, c.tokens_per_rank, c.sync, c.lengths): c.seconds for c in found if c.strategy == "fcp"}
    return {c: c.seconds / fcp[c.cluster, c.tokens_per_rank, c.sync, c.lengths] for c in found}


def show(found: Sequence[Cell], real: Sequence[str]) -> None:
    """Print one row per strategy, and the cases in which fcp is not the quickest."""
    over = ratios(found)
    syncs: tuple[Sync, ...] = ("microbatch", "iteration")
    by_name: dict[str, dict[tuple[Sync, bool], list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell, ratio in over.items():
        by_name[cell.strategy][cell.sync, cell.lengths in real].append(ratio)
    print("| strategy | " + " | ".join(f"{sync}, {which}" for sync in syncs for which in ("real", "made up")) + " |")
    print("|---" * 5 + "|")
    order = sorted(by_name, key=lambda name: statistics.geometric_mean(chain.from_iterable(by_name[name].values())))
    for name in order:
        values = [by_name[name][sync, which] for sync in syncs for which in (True, False)]
        shown = (f"{statistics.geometric_mean(v):.2f}x ({min(v):.2f}-{max(v):.2f})" if v else "-" for v in values)
        print(f"| {name} | " + " | ".join(shown) + " |")
    for sync in syncs:
        gaps = [100 * c.gap for c in found if c.strategy == "fcp" and c.sync == sync]
        print(f"fcp's gap under {sync}: mean {statistics.fmean(gaps):.1f} %, most {max(gaps):.1f} %")
    print("\nquicker than fcp by more than 0.5 %:")
    for cell, ratio in sorted(over.items(), key=lambda one: one[1]):
        if ratio < 0.995:
            print(cell.strategy, cell.lengths, cell.cluster, cell.tokens_per_rank, cell.sync, f"{ratio:.3f}x")


def show_gaps(found: Sequence[Cell]) -> None:
    """Print fcp's gap to its proven bound by sync, set of lengths, budget and cluster, in percent."""
    columns = sorted({(-c.tokens_per_rank, c.cluster) for c in found})
    for sync in ("microbatch", "iteration"):
        gaps: dict[str, dict[tuple[int, str], float]] = defaultdict(dict)
        for cell in found:
            if cell.strategy == "fcp" and cell.sync == sync:
                gaps[cell.lengths][-cell.tokens_per_rank, cell.cluster] = cell.gap
        print(f"\n| `{sync}` | " + " | ".join(f"{cluster}, {-budget:,}" for budget, cluster in columns) + " |")
        print("|---" + "|---:" * len(columns) + "|")
        for name, of_name in gaps.items():
            print(f"| {name} | " + " | ".join(f"{100 * of_name[column]:.2f}" for column in columns) + " |")
        means = [statistics.geometric_mean(1 + one[column] for one in gaps.values()) for column in columns]
        print("| geometric mean | " + " | ".join(f"{100 * (mean - 1):.2f}" for mean in means) + " |")


def main() -> None:
    """Print the table as Markdown, then the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifests", type=Path, nargs="*", default=[], help="Parquet files with a column length")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--budgets", type=int, nargs="+", default=[16_384, 8192], help="tokens per rank")
    parser.add_argument("--lengths", nargs="+", help="sets of lengths, by name; all unless given")
    parser.add_argument("--sequences", type=int, default=512, help="sequences of the step")
    parser.add_argument("--without", nargs="*", default=["flexsp"], help="strategies to leave out")
    parser.add_argument("--only", nargs="*", default=compared_names(), help="strategies to compare with fcp")
    parser.add_argument("--gaps", action="store_true", help="fcp's gap to its bound in every case, and nothing else")
    parser.add_argument("--cells", type=Path, help="write every case as a line of JSON, too")
    options = parser.parse_args()
    manifests = {path.stem: path for path in options.manifests}
    real = [*manifests, *PUBLISHED]
    wanted = options.lengths or [*FAMILIES, *real]
    sets = {name: drawn(name, sequences=options.sequences, manifests=manifests) for name in wanted}
    for name, tokens in sets.items():
        print(f"{name}: mean {tokens.mean():.0f}, median {np.median(tokens):.0f}, longest {tokens.max()}")
    chosen = {"fcp"} if options.gaps else {"fcp", *options.only} - {*options.without}
    names = [name for name in compared_names() if name in chosen]
    started, found = time.perf_counter(), []
    for cell in cells(names, sets, clusters=options.clusters, budgets=options.budgets):
        found.append(cell)
        if options.cells:
            with options.cells.open("a") as lines:
                lines.write(json.dumps(asdict(cell)) + "\n")
    print(f"{len(found)} cases in {time.perf_counter() - started:.0f} s\n")
    if options.gaps:
        show_gaps(found)
    else:
        show(found, real)


if __name__ == "__main__":
    main()
