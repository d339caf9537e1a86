"""Settings of a stream's plan: batching rule, and metadata before planning."""

from __future__ import annotations

from fcp_cli import __version__
from fcp_cli.errors import UsageError
from fcp_cli.plan.metadata.plan_metadata import Batching, ManifestReference, PlanMetadata
from fcp_cli.planning.problem import Problem, Solver


def stream_batching(global_batch_size: int | None, global_batch_tokens: int | None) -> Batching | None:
    """Return the batching rule of a stream, or None for `global_batch_size` sequences each."""
    given = {"global_batch_size": global_batch_size, "global_batch_tokens": global_batch_tokens}
    for name, value in given.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be a whole number of at least 1")
    if global_batch_size is not None and global_batch_tokens is not None:
        raise UsageError("global_batch_size and global_batch_tokens both say what a step trains; give one of them")
    if global_batch_tokens is not None:
        return Batching(by="tokens", tokens=global_batch_tokens)
    return Batching(by="given") if global_batch_size is None else None


def stream_metadata(
    problem: Problem, solver: Solver, global_batch_size: int | None, batching: Batching | None
) -> PlanMetadata:
    """Return the metadata of a stream's plan without totals, manifest and hash."""
    if problem.attention == "ulysses":
        raise UsageError("--attention ulysses holds no sequence longer than all heads' ranks do; give a stream 2d")
    return PlanMetadata(
        **problem.metadata_fields(),
        fcp_version=__version__,
        global_batch_size=global_batch_size or 1,
        seed=0,
        shuffle=False,
        batching=batching,
        solver=solver.name,
        solver_options=solver.options,
        manifest=ManifestReference(name="", rows=0, content_hash=""),
    )
