"""What a wrong cost profile, and times that scatter, cost a plan: `python -m benchmarks.noise_study`.

First table, as Tables 4-5 of the FCP paper: every coefficient is multiplied by Gaussian noise of mean 1, steps are
planned with the wrong profile and timed with the right one. "match" is the share of sequences that run
at the degree they have without noise; the last figure is the step time over that of fcp under iteration without noise
(geometric mean). The paper measured on its clusters, with Qwen3-VL; ours are predictions of the
cost model on the benchmark's length families.

Second table: the plan is right, but every micro-batch takes its predicted time times lognormal noise.

Third table: what ways to plan against such noise would gain.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, fields, replace

import numpy as np

from benchmarks.workloads import FAMILIES, example_profile, family_table
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.pricing import step_prices, step_times
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.make_plan import plan_step
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.util.arrays import FloatArray

NOISE = (0.05, 0.10, 0.20, 0.30, 0.50)
SCATTER = (0.05, 0.08, 0.10, 0.20)
# noise -> (time per step, match) on 32 and 64 devices: FCP paper v2, Tables 4 and 5
PAPER = {
    32: {0.05: (0.0, 1.0), 0.10: (0.0, 1.0), 0.20: (0.0, 1.0), 0.30: (0.0327, 0.927), 0.50: (0.0484, 0.913)},
    64: {0.05: (0.0, 1.0), 0.10: (0.0, 1.0), 0.20: (0.0, 1.0), 0.30: (0.0573, 0.904), 0.50: (0.0616, 0.888)},
}
STRATEGIES: tuple[tuple[str, Sync], ...] = (
    ("fcp-paper", "microbatch"),
    ("fcp", "microbatch"),
    ("fcp", "iteration"),
)
SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")
_LEAST_FACTOR = 0.05  # a coefficient stays positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One strategy on one workload."""

    solver: str
    sync: Sync
    family: str
    ranks: int
    seed: int
    budget: int = 16_384

    def plan(self, profile: CostProfile) -> StepPlan:
        """One step of 512 sequences, planned with a profile, right or wrong."""
        problem = self._problem(profile)
        table = family_table(self.family, sequences=512, seed=self.seed)
        batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=512, shuffle=False))
        return plan_step(batches.batch(0), problem, make_solver(self.solver, batches))

    def _problem(self, profile: CostProfile) -> Problem:
        return Problem(
            num_ranks=self.ranks, ranks_per_node=8, tokens_per_rank=self.budget, sync=self.sync, profile=profile
        )

    def priced(self, step: StepPlan) -> FloatArray:
        """Seconds of a step's micro-batches under the right profile."""
        right = example_profile()
        return step_prices(step, self._problem(right), profile=right).seconds

    def execute(self, step: StepPlan, seconds: FloatArray) -> float:
        """Step time when the micro-batches take `seconds`."""
        start = step_times(
            self.sync,
            wave=step.wave,
            rank_offsets=step.rank_offsets,
            ranks=step.ranks,
            seconds=seconds,
            num_ranks=self.ranks,
        ).start_seconds
        return float((start + seconds).max())


def noisy(profile: CostProfile, noise: float, generator: np.random.Generator) -> CostProfile:
    """Every coefficient and bandwidth times its own Gaussian factor of mean 1."""

    def factor() -> float:
        return max(_LEAST_FACTOR, 1.0 + noise * float(generator.standard_normal()))

    coefficients, bandwidth = profile.coefficients, profile.bandwidth
    return replace(
        profile,
        coefficients=Coefficients(**{f.name: getattr(coefficients, f.name) * factor() for f in fields(Coefficients)}),
        bandwidth=Bandwidth(**{f.name: getattr(bandwidth, f.name) * factor() for f in fields(Bandwidth)}),
    )


def scattered_seconds(step: StepPlan, seconds: FloatArray, *, sigma: float, seed: int) -> FloatArray:
    """`seconds` times lognormal noise of mean 1 per micro-batch; sigma 0.08 scatters them by about 8 %."""
    draws = np.random.default_rng((seed, step.step)).standard_normal(len(seconds))
    return np.asarray(seconds * np.exp(sigma * draws - sigma * sigma / 2.0), dtype=np.float64)


def degree_of_sequence(step: StepPlan) -> FloatArray:
    """[sequences] the degree that each sequence of the batch runs at, by manifest row."""
    degrees = np.repeat(step.degrees, np.diff(step.sequence_offsets))
    return np.asarray(degrees[np.argsort(step.sequences)], dtype=np.float64)


def coefficient_noise(ranks: int, *, draws: int, seeds: int) -> None:
    """Tables 4 and 5."""
    print(f"\n{ranks} ranks, noise on the coefficients: time per step, match, over fcp without noise\n")
    print("| noise | paper | " + " | ".join(f"{solver}, {sync}" for solver, sync in STRATEGIES) + " |")
    print("|---" * (2 + len(STRATEGIES)) + "|")
    for noise in NOISE:
        cells = [_cell(*PAPER[ranks][noise])] if ranks in PAPER else ["-"]
        for solver, sync in STRATEGIES:
            setups = [
                Setup(solver=solver, sync=sync, family=family, ranks=ranks, seed=seed)
                for family in FAMILIES
                for seed in range(seeds)
            ]
            results = [result for setup in setups for result in _replanned(setup, noise, draws)]
            slower, match, over_fcp = zip(*results, strict=True)
            ours = f", {statistics.geometric_mean(over_fcp):.3f}x"
            cells.append(_cell(statistics.fmean(slower), statistics.fmean(match)) + ours)
        print(f"| {noise:.0%} | " + " | ".join(cells) + " |", flush=True)


def _cell(slower: float, match: float) -> str:
    return f"{slower:+.2%}, {match:.1%}"


def _replanned(setup: Setup, noise: float, draws: int) -> list[tuple[float, float, float]]:
    """Per draw: how much longer the step takes, the share of sequences that keep their degree, and over fcp."""
    profile = example_profile()
    right = setup.plan(profile)
    yardstick = replace(setup, solver="fcp", sync="iteration").plan(profile).makespan_seconds
    results = []
    for draw in range(draws):
        # The same wrong profiles for every strategy and family.
        wrong = setup.plan(noisy(profile, noise, np.random.default_rng((setup.seed, draw, round(noise * 100)))))
        seconds = setup.execute(wrong, setup.priced(wrong))
        match = float((degree_of_sequence(wrong) == degree_of_sequence(right)).mean())
        results.append((seconds / right.makespan_seconds - 1.0, match, seconds / yardstick))
    return results


def time_scatter(ranks: int, *, draws: int, seeds: int) -> None:
    """How much longer steps take, and how they then compare, when micro-batches scatter around their prediction."""
    print(
        f"\n{ranks} ranks, lognormal noise per micro-batch, plan unchanged: time per step, over fcp under iteration\n"
    )
    print("| noise | " + " | ".join(f"{solver}, {sync}" for solver, sync in STRATEGIES) + " |")
    print("|---" * (1 + len(STRATEGIES)) + "|")
    for sigma in (0.0, *SCATTER):
        means = [_mean_scattered(solver, sync, ranks, sigma, draws, seeds) for solver, sync in STRATEGIES]
        cells = [f"{slower:+.2%}, {seconds / means[-1][1]:.3f}x" for slower, seconds in means]
        print(f"| {sigma:.0%} | " + " | ".join(cells) + " |", flush=True)


def _mean_scattered(solver: str, sync: Sync, ranks: int, sigma: float, draws: int, seeds: int) -> tuple[float, float]:
    """Mean relative loss to the prediction, and geometric mean of the step seconds."""
    slower, seconds = [], []
    for family in FAMILIES:
        for seed in range(seeds):
            setup = Setup(solver=solver, sync=sync, family=family, ranks=ranks, seed=seed)
            step = setup.plan(example_profile())
            for draw in range(draws):
                taken = setup.execute(step, scattered_seconds(step, step.seconds, sigma=sigma, seed=draw))
                slower.append(taken / step.makespan_seconds - 1.0)
                seconds.append(taken)
    return statistics.fmean(slower), statistics.geometric_mean(seconds)


def hedges(ranks: int, *, draws: int, seeds: int) -> None:
    """What plans that hedge against scatter cost without it and gain with it, against the plan that does not."""
    profile = example_profile()
    c, b = profile.coefficients, profile.bandwidth
    slow = Bandwidth(**{f.name: getattr(b, f.name) / 1.2 for f in fields(Bandwidth)})
    ways = {
        "as planned": (16_384, profile),
        "3/4 of the token budget": (12_288, profile),
        "half the token budget": (8_192, profile),
        "rings 20 % slower": (16_384, replace(profile, bandwidth=slow)),
        "attention 10 % slower": (
            16_384,
            replace(
                profile, coefficients=replace(c, attention_seconds_per_token2=1.1 * c.attention_seconds_per_token2)
            ),
        ),
        "micro-batches half as dear": (
            16_384,
            replace(profile, coefficients=replace(c, microbatch_seconds=c.microbatch_seconds / 2)),
        ),
    }
    print(f"\n{ranks} ranks, planned with another budget or profile: time per step against the plain plan\n")
    print("| sync, planned with | " + " | ".join(f"{sigma:.0%}" for sigma in (0.0, *SCATTER)) + " |")
    print("|---" * (2 + len(SCATTER)) + "|")
    for sync in SYNCS:
        plain: list[float] = []
        for way, (budget, planned_with) in ways.items():
            setups = [
                Setup(solver="fcp", sync=sync, family=family, ranks=ranks, seed=seed, budget=budget)
                for family in FAMILIES
                for seed in range(seeds)
            ]
            plans = [(setup, setup.plan(planned_with)) for setup in setups]
            means = [_mean_executed(plans, sigma, draws) for sigma in (0.0, *SCATTER)]
            plain = plain or means
            cells = [f"{mean / base - 1:+.1%}" for mean, base in zip(means, plain, strict=True)]
            print(f"| {sync}, {way} | " + " | ".join(cells) + " |", flush=True)


def _mean_executed(plans: list[tuple[Setup, StepPlan]], sigma: float, draws: int) -> float:
    """Geometric mean of step seconds under the right profile with scatter."""
    taken = []
    for setup, step in plans:
        seconds = setup.priced(step)
        scattered = (scattered_seconds(step, seconds, sigma=sigma, seed=draw) for draw in range(draws))
        taken += [setup.execute(step, noisy_seconds) for noisy_seconds in scattered]
    return statistics.geometric_mean(taken)


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--draws", type=int, default=8, help="draws of the noise per workload (8)")
    parser.add_argument("--seeds", type=int, default=3, help="batches per family (3)")
    options = parser.parse_args()
    for ranks in options.ranks:
        coefficient_noise(ranks, draws=options.draws, seeds=options.seeds)
    time_scatter(options.ranks[-1], draws=options.draws, seeds=options.seeds)
    hedges(options.ranks[-1], draws=options.draws, seeds=options.seeds)


if __name__ == "__main__":
    main()
