"""What a plan takes under what it was not priced with, and what pricing it gives back: `python -m benchmarks.effects`.

Steps of 512 sequences on 64 ranks, five length families, on nodes like H100's and Ascend 910B's. First table: each
term of the profile is real. "Blind" plans know nothing of it, "aware" ones do, and both are timed with it; the best of
many profiles is the quickest step of plans for the term times 0 to 3, with micro-batches up to twice as dear. Second
table: effects that no profile knows, for plans of each strategy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.disturbances import EFFECTS, stressed_seconds
from benchmarks.workloads import FAMILIES, family_table
from fcp_cli.cost.profile import CostProfile, StepTerms
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import PlanError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.problem import Assignment, Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile

CLUSTERS = ("h100-8x8", "ascend910b-8x8")
RANKS, PER_NODE, SEQUENCES = 64, 8, 512
SYNCS: tuple[Sync, ...] = ("microbatch", "iteration")
_SHORT_CHUNK = 300.0  # tokens of a chunk on which attention runs at half its rate
_SCALES = (0.0, 0.5, 1.0, 2.0, 3.0)
_DEARER = (1.0, 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A term of the profile: under which sync it matters, and the plain profile with it."""

    name: str
    sync: Sync
    profiles: Mapping[str, CostProfile]  # of each cluster


def families(seed: int) -> dict[str, LengthTable]:
    """Five families of lengths; the fifth mixes the others."""
    tables = {name: family_table(name, sequences=SEQUENCES, seed=seed) for name in FAMILIES}
    mixed = np.concatenate([table.length_tokens[at :: len(tables)] for at, table in enumerate(tables.values())])
    return tables | {"mixed": LengthTable(name="mixed", length_tokens=mixed)}


def profile_of(cluster: str, sync: Sync, *, links: int | None = None) -> CostProfile:
    """Qwen3-8B on a cluster whose nodes have so many links; without terms where None."""
    spec = replace(load_cluster(cluster), links_per_node=links, memory_bytes_per_second=None)
    recipe = Recipe(zero_stage=3 if sync == "microbatch" else 2)
    return analytic_profile(load_model("qwen3-8b"), spec, recipe=recipe, sync=sync, ranks=RANKS)


def terms() -> Iterator[Term]:
    """The terms, one by one."""
    shared: tuple[tuple[str, Sync], ...] = (
        ("gathers, one link a node", "microbatch"),
        ("gradients' tail, one link a node", "iteration"),
    )
    for name, sync in shared:
        yield Term(name=name, sync=sync, profiles={c: profile_of(c, sync, links=1) for c in CLUSTERS})
    for sync in SYNCS:
        plain = {cluster: profile_of(cluster, sync) for cluster in CLUSTERS}
        yield Term(name=f"short chunks, {sync}", sync=sync, profiles={c: _with_chunks(p) for c, p in plain.items()})


def _with_chunks(profile: CostProfile) -> CostProfile:
    c = profile.coefficients
    seconds = 2.0 * c.attention_seconds_per_token2 * _SHORT_CHUNK
    return replace(profile, coefficients=replace(c, chunk_seconds_per_token=seconds))


def _without(profile: CostProfile) -> CostProfile:
    return replace(profile, step=StepTerms(), coefficients=replace(profile.coefficients, chunk_seconds_per_token=0.0))


def _scaled(profile: CostProfile, scale: float, dearer: float) -> CostProfile:
    c, step = profile.coefficients, profile.step
    return replace(
        profile,
        step=replace(step, wave_floor_seconds=scale * step.wave_floor_seconds),
        coefficients=replace(
            c,
            chunk_seconds_per_token=scale * c.chunk_seconds_per_token,
            microbatch_seconds=dearer * c.microbatch_seconds,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One step on one cluster."""

    table: LengthTable
    sync: Sync
    tokens: int  # that a rank may hold

    def batches(self, profile: CostProfile) -> GlobalBatches:
        """The step under a profile."""
        problem = Problem(
            num_ranks=RANKS, ranks_per_node=PER_NODE, tokens_per_rank=self.tokens, sync=self.sync, profile=profile
        )
        return GlobalBatches(self.table, problem, BatchSettings(global_batch_size=SEQUENCES, shuffle=False))

    def planned(self, solver: str, profile: CostProfile) -> Assignment:
        """A strategy's answer for a profile."""
        batches = self.batches(profile)
        return make_solver(solver, batches).assign(batches.batch(0))

    def seconds(self, answer: Assignment, profile: CostProfile) -> float:
        """What an answer takes under a profile."""
        batches = self.batches(profile)
        return makespan_seconds(answer, batches.batch(0), batches.problem)


def term_row(term: Term, tables: Mapping[str, LengthTable], tokens: int) -> tuple[str, ...]:
    """Blind over its prediction (mean, worst), aware over its own blind model, and others over aware."""
    blind_over, aware_over, bound_over = list[float](), list[float](), list[float]()
    best_over = list[float]()
    rivals: dict[str, list[float]] = {"fcp-paper": [], "static": []}
    for profile in term.profiles.values():
        plain = _without(profile)
        for table in tables.values():
            case = Case(table=table, sync=term.sync, tokens=tokens)
            blind = case.planned("fcp", plain)
            predicted, taken = case.seconds(blind, plain), case.seconds(blind, profile)
            aware = case.seconds(case.planned("fcp", profile), profile)
            many = [case.planned("fcp", _scaled(profile, scale, dearer)) for scale in _SCALES for dearer in _DEARER]
            batches = case.batches(profile)
            bound_over.append(aware / lower_bound_seconds(batches.batch(0).work, batches.problem))
            blind_over.append(taken / predicted)
            aware_over.append(aware / predicted)
            best_over.append(aware / min(case.seconds(answer, profile) for answer in many))
            for name, found in rivals.items():
                found.append(_rival(case, name, profile) / aware)
    mean = statistics.geometric_mean
    return (
        term.name,
        f"{mean(blind_over):.3f}x",
        f"{max(blind_over):.2f}x",
        f"{mean(aware_over):.3f}x",
        f"{mean(bound_over):.3f}x",
        f"{mean(best_over):.3f}x",
        f"{max(best_over):.3f}x",
        *(f"{mean(found):.2f}x" for found in rivals.values()),
    )


def _rival(case: Case, name: str, profile: CostProfile) -> float:
    try:
        return case.seconds(case.planned(name, profile), profile)
    except PlanError:
        return float("nan")


def stress_rows(sync: Sync, tables: Mapping[str, LengthTable], tokens: int) -> Iterator[tuple[str, ...]]:
    """Of each strategy: its prediction, and what each effect makes of it, over plain fcp's prediction (mean, worst)."""
    found: dict[str, dict[str, list[float]]] = {}
    for cluster in CLUSTERS:
        profile = profile_of(cluster, sync)
        for table in tables.values():
            case = Case(table=table, sync=sync, tokens=tokens)
            batches = case.batches(profile)
            batch, base = batches.batch(0), 0.0
            for name in ("fcp", "fcp-paper", "static"):
                answer = case.planned(name, profile)
                seconds = makespan_seconds(answer, batch, batches.problem)
                base = base or seconds
                values = {"predicted": seconds, **stressed_seconds(answer, batch, batches.problem)}
                for effect, value in values.items():
                    found.setdefault(name, {}).setdefault(effect, []).append(value / base)
    for name, effects in found.items():
        cells = (f"{statistics.geometric_mean(over):.3f}x ({max(over):.2f})" for over in effects.values())
        yield (f"{name}, {sync}", *cells)


def _print(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|---" + "|---:" * (len(head) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    parser.add_argument("--tokens", type=int, default=8192, help="that a rank may hold in a micro-batch (8192)")
    options = parser.parse_args()
    tables, tokens = families(options.seed), options.tokens
    head = (
        "term",
        "blind / model",
        "worst",
        "aware / model",
        "aware / bound",
        "aware / best of many",
        "worst",
        "fcp-paper",
        "static",
    )
    _print(head, (term_row(term, tables, tokens) for term in terms()))
    print()
    _print(
        ("strategy, sync", "predicted", *EFFECTS), (row for sync in SYNCS for row in stress_rows(sync, tables, tokens))
    )


if __name__ == "__main__":
    main()
