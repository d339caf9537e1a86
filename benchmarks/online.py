"""Whether planning while training shows in a step: `python -m benchmarks.online`.

One process stands for rank 0 of many: it computes for a while in each step, with a core of its own at best, and takes
the steps of a stream, once planned while it computes and once planned before. What planning costs is the difference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.workloads import EXAMPLE_PROFILE
from fcp_cli import Planner
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import OnlineSettings
from fcp_cli.runtime.online import StreamSource
from fcp_cli.util.arrays import IntArray


class OneOfMany:
    """A `Control` of rank 0 whose other ranks always agree."""

    rank = 0
    plans = True

    def __init__(self, size: int) -> None:
        self.size = size

    def spread(self, message: bytes) -> bytes:
        return message

    def from_rank(self, rank: int, message: bytes) -> bytes:
        return message

    def table(self, words: list[int]) -> IntArray:
        return np.array([words], dtype=np.int64)


def drawn(count: int) -> Iterator[tuple[int, int]]:
    """Lengths of a long tail."""
    generator = np.random.default_rng(0)
    for number in range(count):
        yield number, int(np.clip(generator.lognormal(7.5, 1.2), 16, 100_000))


def compute(seconds: float) -> None:
    """Keep a core busy."""
    until = time.perf_counter() + seconds
    matrix = np.ones((64, 64))
    while time.perf_counter() < until:
        matrix @ matrix


def step_seconds(steps: Iterator[object], seconds: float) -> tuple[list[float], list[float]]:
    """Return [steps] the seconds of each step but the first, and of it those in which the loop waited for the plan."""
    whole, waited = [], []
    begun = time.perf_counter()
    for _ in steps:
        waited.append(time.perf_counter() - begun)
        compute(seconds)
        ended = time.perf_counter()
        whole.append(ended - begun)
        begun = ended
    return whole[1:], waited[1:]


def online_steps(plan: Path, settings: OnlineSettings, count: int) -> Iterator[object]:
    """Yield a stream's steps as a session takes them."""
    source = StreamSource(drawn(count), settings, plan, OneOfMany(settings.metadata.num_ranks), None)
    source.open(0)
    end = 0
    for step in source.steps():
        source.hand_out(step.step)
        source.want(step.step)
        yield step
        end = step.step + 1
    source.close(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.2, help="that a step computes")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        (profile := Path(folder) / "profile.yaml").write_text(EXAMPLE_PROFILE)
        planner = Planner(profile, ranks=options.ranks, ranks_per_node=8, tokens_per_rank=16_384, sync="iteration")
        settings = planner.online(global_batch_size=options.sequences)
        plan = Path(folder) / "plan.parquet"
        online = step_seconds(online_steps(plan, settings, options.steps * options.sequences), options.seconds)
        offline = step_seconds(iter(PlanReader(plan).steps()), options.seconds)
    for name, (whole, waited) in (("planned while computing", online), ("planned before", offline)):
        spread = statistics.stdev(whole)
        print(
            f"{name:24} {statistics.median(whole) * 1e3:7.1f} ms a step (standard deviation {spread * 1e3:.1f}), "
            f"of which {statistics.median(waited) * 1e3:.2f} ms waiting for its plan, at most {max(waited) * 1e3:.1f}"
        )


if __name__ == "__main__":
    main()
