"""Measures step times of several strategies on paced ranks, which do not compete for cores.

Each rank is a process of the real runtime. Its device only sleeps, for the seconds of Qwen3-8B on H200s in nodes of
four (from `fcp profile --analytic`) times `PacedWork.slower`. Keys, values and gradients are sent over gloo and arrive
no earlier than over that cluster's links (see `device`). Planning does not need torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from fcp_cli.cost.profile import Bandwidth, CostProfile, StepTerms, dump_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import RunError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.file import PlanReader, plan_writer
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp_solver import compile_missing
from fcp_cli.planning.make_plan import plan_metadata, plan_step
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.runs.metrics_reader import RunStep, read_metrics, run_step

RANKS_PER_NODE = 4
_START_SECONDS, _MOST_PER_PREDICTED = 120.0, 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PacedWork:
    """The first steps of a table of lengths; longer sequences are dropped.

    Attributes:
        sequences_per_rank: sequences per rank and step.
        slower: factor on all times of the profile, so that a gloo hop is short in comparison.
    """

    table: LengthTable
    steps: int
    tokens_per_rank: int = 8192
    max_length: int = 65_536
    sequences_per_rank: int = 2
    slower: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PacedSteps:
    """Measured steps of a plan, in order, without warm-up."""

    plan: Path
    steps: tuple[RunStep, ...]

    @property
    def predicted_seconds(self) -> float:
        """Mean predicted step time."""
        return float(np.mean([step.predicted_seconds for step in self.steps]))

    @property
    def measured_seconds(self) -> float:
        """Mean measured step time on rank 0, including the optimizer step."""
        return float(np.mean([step.seconds for step in self.steps]))


def library_table() -> LengthTable:
    """Return the lengths of the .py files of Python's standard library, with a token per byte."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    sizes = np.array([path.stat().st_size for path in files], dtype=np.int64)
    return LengthTable(name="Python's standard library", length_tokens=sizes[sizes > 0])


def paced_profile(num_ranks: int, slower: float) -> CostProfile:
    """Return the computed profile of Qwen3-8B on H200s, slowed down by `slower`, without end-of-step costs."""
    computed = analytic_profile(
        load_model("qwen3-8b"), load_cluster("h200-8x8"), recipe=Recipe(), sync="iteration", ranks=num_ranks
    )
    c, bandwidth = computed.coefficients, computed.bandwidth
    coefficients = replace(
        c, **{name: slower * getattr(c, name) for name in asdict(c) if name.partition("_per_")[0].endswith("seconds")}
    )
    profile = replace(
        computed,
        cluster=f"paced ranks, seconds of h200-8x8 times {slower:g}",
        coefficients=coefficients,
        bandwidth=Bandwidth(intra_node=bandwidth.intra_node / slower, inter_node=bandwidth.inter_node / slower),
        step=StepTerms(),
    )
    return replace(profile, text=dump_cost_profile(profile))


def write_plans(folder: Path, work: PacedWork, *, num_ranks: int, strategies: Sequence[str]) -> dict[str, Path]:
    """Plan the sequences with each strategy; return the plan files."""
    problem = Problem(
        num_ranks=num_ranks,
        ranks_per_node=RANKS_PER_NODE,
        tokens_per_rank=work.tokens_per_rank,
        sync="iteration",
        profile=paced_profile(num_ranks, work.slower),
    )
    settings = BatchSettings(
        global_batch_size=work.sequences_per_rank * num_ranks,
        max_length=work.max_length,
        overlong="drop",
        step_limit=work.steps,
    )
    compile_missing([problem])
    plans = {strategy: folder / f"{strategy}-{num_ranks}.parquet" for strategy in strategies}
    for strategy, path in plans.items():
        batches = GlobalBatches(work.table, problem, settings)
        solver = make_solver(strategy, batches)
        with plan_writer(path, plan_metadata(work.table, batches, solver)) as writer:
            for batch in batches:
                writer.append(plan_step(batch, problem, solver))
    return plans


def run(plans: Mapping[str, Path], *, num_ranks: int) -> dict[str, PacedSteps]:
    """Run the plans one after another on paced ranks; return the steps by strategy."""
    predicted = sum(step.makespan_seconds for path in plans.values() for step in PlanReader(path).steps())
    most = _START_SECONDS + _MOST_PER_PREDICTED * predicted
    command = [sys.executable, "-m", "fcp_cli.cli.paced_ranks", str(num_ranks), *map(str, plans.values())]
    # In a separate session, so that Ctrl-C reaches only this process, which then kills all ranks.
    ranks = subprocess.Popen(command, env=without_settings(os.environ), start_new_session=True)
    try:
        status = ranks.wait(timeout=most)
    except subprocess.TimeoutExpired:
        raise RunError(f"{num_ranks} paced ranks took over {most:.0f} s: the machine is too busy") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    if status:
        raise RunError(f"one of {num_ranks} paced ranks failed; its message is above")
    return {strategy: PacedSteps(plan=path, steps=measured_steps(metrics_of(path))) for strategy, path in plans.items()}


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without FCP_ settings, which may belong to another job."""
    return {name: value for name, value in environment.items() if not name.startswith("FCP_")}


def metrics_of(plan: Path) -> Path:
    """Return the metrics file of a plan's run."""
    return plan.with_suffix(".jsonl")


def measured_steps(metrics: Path) -> tuple[RunStep, ...]:
    """Return the steps of a run without warm-up, in which ranks connect."""
    steps = (run_step(record) for record in read_metrics(metrics) if record["kind"] == "step")
    return tuple(step for step in steps if not step.warm_up)


def typical_step(static: Sequence[float], ours: Sequence[float]) -> int:
    """Return the step whose gain is closest to the total gain, from seconds per step."""
    gains = np.asarray(static) / np.asarray(ours)
    return int(np.abs(gains - np.sum(static) / np.sum(ours)).argmin())
