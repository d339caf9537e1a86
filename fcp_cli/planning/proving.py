"""Proves again what a plan states beyond its rows: lower bounds, the batches that its seed draws, and its solver."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np

from fcp_cli import __version__
from fcp_cli.errors import FcpError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.rings import BrokenRule
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import BrokenAssignmentError, assemble, step_bound_seconds
from fcp_cli.planning.batches import GlobalBatches, batch_of, settings_of, spread_steps
from fcp_cli.planning.bounds import simple_bound_seconds
from fcp_cli.planning.compiled.certificate import area_bound
from fcp_cli.planning.problem import Problem, problem_of
from fcp_cli.planning.solvers import make_solver, solver_names, strategy
from fcp_cli.util.compiling import is_kept
from fcp_cli.util.words import counted

MOST_PROVEN = 32
"""Steps whose bound is proven again in full; of others, spread evenly between them, only the simple bounds."""
_TOLERANCE = 1e-6  # relative: sums depend on the order of sequences, which the plan does not keep


def unproven(metadata: PlanMetadata, manifest: LengthTable | None) -> dict[str, str]:
    """Return why the bounds or the solver of a plan cannot be proven again here; nothing of those that can."""
    if why := _bounds_unproven(metadata, manifest):
        return {"bounds": why, "solver": why}
    if metadata.solver not in solver_names():  # found by `prove_again`
        return {}
    if manifest is None:
        return {"solver": "name the manifest with --manifest"}
    if not _has_own_batches(metadata) or metadata.refits:
        return {"solver": "its batches, or its prices, came from a run"}
    if not strategy(metadata.solver).factory:
        return {"solver": f"{metadata.solver} is of another package"}
    if "milp_seconds" in strategy(metadata.solver).options:
        return {"solver": f"{metadata.solver} depends on the time that it has"}
    return {}


def _bounds_unproven(metadata: PlanMetadata, manifest: LengthTable | None) -> str:
    if metadata.fcp_version != __version__:
        return f"fcp {metadata.fcp_version} made the plan, and this is {__version__}"
    if not is_kept(area_bound):
        return "the planner is not compiled here; 'fcp plan' compiles it"
    costs = problem_of(metadata, name="the plan").profile.coefficients
    has_images = costs.vision_seconds_per_patch + costs.vision_seconds_per_patch2 > 0
    if manifest is None and (metadata.masked_sequences or has_images):
        return "they depend on masks or images; name the manifest with --manifest"
    return ""


def _has_own_batches(metadata: PlanMetadata) -> bool:
    """Return whether the plan's settings draw its batches: not another plan that it continues, nor a stream."""
    return metadata.continues is None and (metadata.batching is None or metadata.batching.by != "given")


def prove_again(path: Path, manifest: LengthTable | None, *, without: Container[str] = ()) -> Iterator[BrokenRule]:
    """Yield what cannot be proven of a plan that passed `check_plan`.

    With its manifest, global batches are drawn again from the seed. Lower bounds are computed again, and the named
    solver plans a step again, `without` those that `unproven` returns.
    """
    reader = PlanReader(path)
    metadata = reader.metadata
    if metadata.fcp_version == __version__ and metadata.solver not in solver_names():
        yield BrokenRule(message=f"its solver is {metadata.solver}; installed are {', '.join(solver_names())}")
        return
    if "bounds" not in without:
        _load_numba()
    problem, refit = problem_of(metadata, name=str(path), step=metadata.first_step), metadata.refit_at(0)
    batches: GlobalBatches | None = None
    if manifest is not None and _has_own_batches(metadata):
        try:
            batches = GlobalBatches(manifest, problem, settings_of(metadata))
        except FcpError as error:  # its settings make no plan of this manifest
            yield BrokenRule(message=f"its settings make no batches of {manifest.name}: {error}")
            return
    full = set(spread_steps(metadata.steps, MOST_PROVEN))
    closest: StepPlan | None = None
    for number, step in enumerate(reader.steps()):
        if batches is not None:
            rows = batches.rows_of(number) if number < len(batches) else step.sequences[:0]
            if not np.array_equal(np.sort(step.sequences), np.sort(rows)):
                drawn = f"seed {metadata.seed}" if metadata.shuffle else "the manifest's order"
                message = f"its {counted(len(step.sequences), 'sequence')} are not those of {drawn}"
                yield BrokenRule(step=step.step, message=message)
                return
        if "bounds" in without:
            continue
        if metadata.refit_at(step.step) is not refit:
            problem, refit = problem_of(metadata, name=str(path), step=step.step), metadata.refit_at(step.step)
        yield from _prove_bound(step, problem, manifest, in_full=number in full)
        if closest is None or _gap(step) < _gap(closest):
            closest = step
    if batches is not None and closest is not None and "solver" not in without:
        yield from _prove_solver(closest, metadata, batches)


def _load_numba() -> None:
    """Load numba without SciPy's linear algebra, a quarter of a second for functions that no kernel calls."""
    if "scipy" not in sys.modules:
        sys.modules["scipy"] = None  # type: ignore[assignment]
        try:
            import_module("numba.np.arraymath")
        finally:
            del sys.modules["scipy"]


def _prove_bound(
    step: StepPlan, problem: Problem, manifest: LengthTable | None, *, in_full: bool
) -> Iterator[BrokenRule]:
    """Compute a step's lower bound again, or only the simple one that it must not be below."""
    batch = batch_of(_sequences(step, manifest), problem, step=step.step, rows=step.sequences)
    if in_full:
        proven = step_bound_seconds(batch, problem)
        is_wrong = not abs(step.bound_seconds - proven) <= _TOLERANCE * proven
    else:
        proven = simple_bound_seconds(batch.work, problem)
        is_wrong = step.bound_seconds < proven * (1 - _TOLERANCE)
    if is_wrong:
        message = f"its lower bound is {step.bound_seconds:.6g} s, but {proven:.6g} s are proven"
        yield BrokenRule(step=step.step, message=message)


def _gap(step: StepPlan) -> float:
    """Return a step's gap; infinity if it is 0, since any solver may reach that. A small gap is quick to plan again."""
    gap = step.makespan_seconds / step.bound_seconds - 1.0
    return gap if gap > _TOLERANCE else math.inf


def _prove_solver(step: StepPlan, metadata: PlanMetadata, batches: GlobalBatches) -> Iterator[BrokenRule]:
    """Plan a step again by the named solver, with the options that it takes, and compare options and makespan."""
    name, stated = metadata.solver, dict(metadata.solver_options)
    taken = {option: value for option, value in stated.items() if option in strategy(name).options}
    try:
        solver = make_solver(name, batches, **taken)
        batch = batches.batch(step.step)
        makespan = assemble(solver.assign(batch), batch, batches.problem, step.bound_seconds).makespan_seconds
    except (FcpError, BrokenAssignmentError) as error:
        yield BrokenRule(message=f"its solver {name} makes no such plan: {error}")
        return
    if (options := json.loads(json.dumps(dict(solver.options)))) != stated:
        yield BrokenRule(message=f"its solver {name} has the options {options}, but {stated} are stated")
    elif not abs(makespan - step.makespan_seconds) <= _TOLERANCE * makespan:
        message = f"it takes {step.makespan_seconds:.6g} s, but its solver {name} plans {makespan:.6g} s"
        yield BrokenRule(step=step.step, message=message)


def _sequences(step: StepPlan, manifest: LengthTable | None) -> LengthTable:
    lengths = step.lengths.astype(np.int64)  # as planned: longer ones may be truncated
    if manifest is None:
        return LengthTable(name="the plan", length_tokens=lengths)
    return replace(manifest.take(step.sequences), length_tokens=lengths)
