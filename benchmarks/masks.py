"""What it gains to plan with the masks of sequences, and how even a ring's members are: `python -m benchmarks.masks`.

Steps of 512 sequences of the benchmark families on 64 ranks, some of the sequences with masks. Each step is planned
twice, with the mask factor of every sequence and as if all were causal, and both plans are timed with the masks.

Members: of a sequence of 65,536 tokens with each mask, how much more pairs than the mean the fullest of 2 to 8 members
has, at worst, and the most kernel calls of a hop.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from benchmarks.workloads import FAMILIES, example_profile, family_table
from fcp_cli.cost.profile import CostProfile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.runtime.layout import Hop, MaskedLayout
from fcp_cli.util.masks import CAUSAL, Mask, chunk_pairs, full, prefix, segments

RANKS, PER_NODE, SEQUENCES = 64, 8, 512
LENGTH = 65_536
SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")


def half_full(length: int, draw: np.random.Generator) -> Mask:
    """A mixture of causal texts and of sequences that see all of themselves."""
    return full() if draw.random() < 0.5 else CAUSAL


def prompts(length: int, draw: np.random.Generator) -> Mask:
    """A prompt of any share of the sequence, and its answer."""
    return prefix(int(length * draw.random()))


def images(length: int, draw: np.random.Generator) -> Mask:
    """Images of 256 tokens, 400 tokens apart."""
    return segments((start, start + 256) for start in range(50, length - 256, 656))


def half_videos(length: int, draw: np.random.Generator) -> Mask:
    """A mixture of causal texts and of videos in chunks of 1,560 clean tokens, which are trained by teacher forcing."""
    if draw.random() < 0.5 or length % 2:
        return CAUSAL
    whole, rest = divmod(length // 2, 1560)
    return chunk_pairs([1560] * whole + [rest] * (rest > 0))


DATA: Mapping[str, Callable[[int, np.random.Generator], Mask]] = {
    "half of the sequences full": half_full,
    "prefixes of any share": prompts,
    "images of 256 tokens": images,
    "half of them chunk pairs": half_videos,
}
MASKS: Mapping[str, Mask] = {
    "causal": CAUSAL,
    "full": full(),
    "prefix of 3/4": prefix(LENGTH * 3 // 4),
    "prefix of 1/20": prefix(LENGTH // 20),
    "99 images of 256 tokens": segments((start, start + 256) for start in range(50, LENGTH - 256, 656)),
    "3 images of 16k tokens": segments((start, start + 16_000) for start in range(1000, LENGTH - 16_000, 20_000)),
    "22 chunk pairs": chunk_pairs([1560] * 21 + [8]),
}


def gain(table: LengthTable, profile: CostProfile, sync: Sync, budget: int) -> float:
    """Return the seconds of a step planned as causal over those of one planned with its masks."""
    problem = Problem(num_ranks=RANKS, ranks_per_node=PER_NODE, tokens_per_rank=budget, sync=sync, profile=profile)
    seconds = []
    for planned in (replace(table, eta=None), table):
        settings = BatchSettings(global_batch_size=len(table), shuffle=False)
        batches = GlobalBatches(planned, problem, settings)
        found = make_solver("fcp", batches).assign(batches.batch(0))
        seconds.append(assemble(found, GlobalBatches(table, problem, settings).batch(0), problem).makespan_seconds)
    return seconds[0] / seconds[1]


def masked_table(family: str, mask_of: Callable[[int, np.random.Generator], Mask], seed: int) -> LengthTable:
    """Return a step of a family whose sequences have masks."""
    table, draw = family_table(family, sequences=SEQUENCES, seed=seed), np.random.default_rng(seed)
    etas = [mask_of(length, draw).eta(length) for length in table.length_tokens.tolist()]
    return replace(table, eta=np.array(etas))


def pairs_of(hop: Hop) -> int:
    """Return the pairs of a query and a key that a call computes."""
    lengths = zip(hop.segments.q_lengths, hop.segments.k_lengths, strict=True)
    return sum(q * (q + 1) // 2 if hop.segments.causal else q * k for q, k in lengths)


def members(mask: Mask) -> Iterator[tuple[float, int]]:
    """Yield by degree how much more pairs the fullest member has than the mean, and the most calls of a hop."""
    for degree in range(2, 9):
        layout = MaskedLayout((LENGTH,), degree, (mask,))
        hops = {pair: layout.hops(*pair) for pair in product(range(degree), repeat=2)}
        pairs = np.array([[sum(map(pairs_of, hops[i, j])) for j in range(degree)] for i in range(degree)]).sum(axis=1)
        assert pairs.sum() == mask.pairs(LENGTH)
        yield float(pairs.max() / pairs.mean() - 1), max(map(len, hops.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=4, help="steps of each family")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens per rank")
    options = parser.parse_args()
    profile = example_profile()
    print(f"{'masks':30}{'sync':12}" + "".join(f"{family:>13}" for family in FAMILIES))
    for (name, mask_of), sync in product(DATA.items(), SYNCS):
        gains = [
            [gain(masked_table(family, mask_of, seed), profile, sync, options.budget) for seed in range(options.seeds)]
            for family in FAMILIES
        ]
        print(f"{name:30}{sync:12}" + "".join(f"{np.exp(np.log(of).mean()):13.3f}" for of in gains), flush=True)
    print(f"\n{'a sequence of 65,536 tokens':30}{'eta':>8}{'uneven':>9}{'calls':>7}")
    for name, mask in MASKS.items():
        uneven, calls = zip(*members(mask), strict=True)
        print(f"{name:30}{mask.eta(LENGTH):8.3f}{max(uneven):9.2%}{max(calls):7}")


if __name__ == "__main__":
    main()
