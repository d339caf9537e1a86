"""Proves again what a plan states beyond its rows: lower bounds, and the batches that its seed draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from fcp_cli import __version__
from fcp_cli.errors import FcpError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.rings import BrokenRule
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import step_bound_seconds
from fcp_cli.planning.batches import GlobalBatches, batch_of, settings_of, spread_steps
from fcp_cli.planning.bounds import simple_bound_seconds
from fcp_cli.planning.compiled.certificate import area_bound
from fcp_cli.planning.problem import problem_of
from fcp_cli.planning.solvers import solver_names
from fcp_cli.util.compiling import is_kept
from fcp_cli.util.words import counted

MOST_PROVEN = 32
"""Steps whose bound is proven again in full; of others, spread evenly between them, only the simple bounds."""
_TOLERANCE = 1e-6  # relative: sums depend on the order of sequences, which the plan does not keep


def unproven(metadata: PlanMetadata, manifest: LengthTable | None) -> str:
    """Return why the bounds of a plan cannot be proven again here, or ""."""
    if metadata.fcp_version != __version__:
        return f"fcp {metadata.fcp_version} made the plan, and this is {__version__}"
    if not is_kept(area_bound):
        return "the planner is not compiled here; 'fcp plan' compiles it"
    costs = problem_of(metadata, name="the plan").profile.coefficients
    has_images = costs.vision_seconds_per_patch + costs.vision_seconds_per_patch2 > 0
    if manifest is None and (metadata.masked_sequences or has_images):
        return "they depend on masks or images; name the manifest with --manifest"
    return ""


def prove_again(path: Path, manifest: LengthTable | None, *, bounds: bool) -> Iterator[BrokenRule]:
    """Yield what cannot be proven of a plan that passed `check_plan`: solver, batches (with its manifest), `bounds`."""
    # The stated solver exists here, unless another package has it, and makes plans.
    metadata = PlanReader(path).metadata
    if metadata.fcp_version == __version__ and metadata.solver not in solver_names():
        yield BrokenRule(message=f"its solver is {metadata.solver}; installed are {', '.join(solver_names())}")
    if manifest is not None:
        yield from _prove_batches(path, manifest)
    if bounds:
        yield from _prove_bounds(path, manifest)


def _prove_bounds(path: Path, manifest: LengthTable | None) -> Iterator[BrokenRule]:
    """Compute the lower bounds again, and yield those that differ."""
    reader = PlanReader(path)
    metadata = reader.metadata
    full = set(spread_steps(metadata.steps, MOST_PROVEN))
    problem, refit = problem_of(metadata, name=str(path), step=metadata.first_step), metadata.refit_at(0)
    for number, step in enumerate(reader.steps()):
        if metadata.refit_at(step.step) is not refit:
            problem, refit = problem_of(metadata, name=str(path), step=step.step), metadata.refit_at(step.step)
        batch = batch_of(_sequences(step, manifest), problem, step=step.step, rows=step.sequences)
        if number in full:
            proven = step_bound_seconds(batch, problem)
            is_wrong = not abs(step.bound_seconds - proven) <= _TOLERANCE * proven
        else:
            proven = simple_bound_seconds(batch.work, problem)
            is_wrong = step.bound_seconds < proven * (1 - _TOLERANCE)
        if is_wrong:
            message = f"its lower bound is {step.bound_seconds:.6g} s, but {proven:.6g} s are proven"
            yield BrokenRule(step=step.step, message=message)


def _sequences(step: StepPlan, manifest: LengthTable | None) -> LengthTable:
    lengths = step.lengths.astype(np.int64)  # as planned: longer ones may be truncated
    if manifest is None:
        return LengthTable(name="the plan", length_tokens=lengths)
    return replace(manifest.take(step.sequences), length_tokens=lengths)


def _prove_batches(path: Path, manifest: LengthTable) -> Iterator[BrokenRule]:
    """Draw the global batches again from the seed, and yield the first step with other sequences.

    Plans that continue a run, or whose batches a stream gave, are skipped: their batches are of another plan.
    """
    reader = PlanReader(path)
    metadata = reader.metadata
    if metadata.continues is not None or (metadata.batching is not None and metadata.batching.by == "given"):
        return
    problem = problem_of(metadata, name=str(path))
    try:
        batches = GlobalBatches(manifest, problem, settings_of(metadata))
    except FcpError as error:  # its settings make no plan of this manifest
        yield BrokenRule(message=f"its settings make no batches of {manifest.name}: {error}")
        return
    for number, step in enumerate(reader.steps()):
        rows = batches.rows_of(number) if number < len(batches) else step.sequences[:0]
        if not np.array_equal(np.sort(step.sequences), np.sort(rows)):
            drawn = f"seed {metadata.seed}" if metadata.shuffle else "the manifest's order"
            yield BrokenRule(
                step=step.step, message=f"its {counted(len(step.sequences), 'sequence')} are not those of {drawn}"
            )
            return
