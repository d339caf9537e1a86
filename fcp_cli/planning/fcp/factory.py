"""Makes the solver `fcp` for a plan, with every option that `--solver fcp` takes."""

from __future__ import annotations

from fcp_cli.errors import UsageError
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.fcp import solver
from fcp_cli.planning.problem import Solver


def make_solver(batches: GlobalBatches, *, robust: bool = False, **limits: int | None) -> Solver:
    """Make the solver for these batches.

    Args:
        batches: the batches to plan.
        robust: of answers that are as quick choose the one that suffers least from noise and contention.
        limits: `max_degree`, `max_groups` or `max_peers`; see `solver.make_solver`.
    """
    if not robust:
        return solver.make_solver(batches, **limits)
    if limits:
        limit = next(iter(limits)).replace("_", "-")
        raise UsageError(
            f"--robust chooses among all answers of --solver fcp, which --{limit} rules out; drop one of the two"
        )
    if batches.problem.pipeline is not None:
        raise UsageError("--robust does not support pipelines; drop it, or plan without --pipeline-parallel")
    from fcp_cli.planning.fcp.robust import RobustSolver

    return RobustSolver(plain=solver.solver_of(batches.problem))
