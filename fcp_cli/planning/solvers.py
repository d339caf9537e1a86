"""The solvers by name. Each is imported only when it is asked for, so that none slows down another's start."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeAlias, cast

from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import UsageError
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.problem import Solver
from fcp_cli.recipe import SplitAttention

# Makes a solver for one plan. It may look at the plan's batches to tune itself once, as `static` does.
SolverFactory: TypeAlias = Callable[[GlobalBatches], Solver]

# name -> "module:factory"
_FACTORIES = {
    "bytescale": "fcp_cli.planning.published.bytescale:make_solver",
    "deepspeed-ulysses": "fcp_cli.planning.published.split_heads:make_ulysses",
    "fcp": "fcp_cli.planning.fcp.solver:make_solver",
    "fcp-paper": "fcp_cli.planning.published.fcp_paper:make_solver",
    "flexsp": "fcp_cli.planning.published.flexsp:make_solver",
    "karmarkar-karp": "fcp_cli.planning.published.karmarkar_karp:make_solver",
    "megatron-any-degree": "fcp_cli.planning.published.megatron_any_degree:make_solver",
    "megatron-dynamic-cp": "fcp_cli.planning.published.megatron_dynamic_cp:make_solver",
    "megatron-packing": "fcp_cli.planning.published.megatron_packing:make_solver",
    "static": "fcp_cli.planning.static:make_solver",
    "usp": "fcp_cli.planning.published.split_heads:make_usp",
}
DEFAULT = "fcp"
# Strategies that split heads, and how; the others have rings, and fcp whatever is asked for.
SPLITS_HEADS: dict[str, SplitAttention] = {"deepspeed-ulysses": "ulysses", "usp": "2d"}


def solver_names() -> list[str]:
    """Return the names of all solvers, the default first."""
    return [DEFAULT, *(name for name in _FACTORIES if name != DEFAULT)]


def names_under(profile: CostProfile) -> list[str]:
    """Return the names of the solvers that plan under a profile: those that split heads need it to price that."""
    return [name for name in solver_names() if profile.heads is not None or name not in SPLITS_HEADS]


def make_solver(
    name: str,
    batches: GlobalBatches,
    *,
    max_degree: int | None = None,
    max_groups: int | None = None,
    max_peers: int | None = None,
    robust: bool = False,
) -> Solver:
    """Make the named solver for these batches.

    Args:
        name: one of `solver_names()`.
        batches: what is planned.
        max_degree: 1 forbids rings; None: no limit.
        max_groups: most groups of degree > 1 over the whole plan; None: no limit.
        max_peers: most ranks that a rank has beside it in rings over the whole plan; None: no limit.
        robust: of answers that are as quick choose the one that suffers least from noise and contention.

    Raises:
        UsageError: no such solver, one that knows no such limit or choice, or a limit that cannot be kept.
    """
    if name not in _FACTORIES:
        raise UsageError(f"--solver is {name!r}; it must be one of {', '.join(solver_names())}")
    module, factory = _FACTORIES[name].split(":")
    make = getattr(import_module(module), factory)
    limits = {"max_degree": max_degree, "max_groups": max_groups, "max_peers": max_peers}
    given = [limit for limit, value in limits.items() if value is not None]
    if robust:
        return _robust(name, given, batches)
    if not given:
        return cast(SolverFactory, make)(batches)
    if name != "fcp":
        raise UsageError(f"--{given[0].replace('_', '-')} works with --solver fcp only, not with {name}")
    return cast(Solver, make(batches, **limits))


def _robust(name: str, limits: list[str], batches: GlobalBatches) -> Solver:
    if name != "fcp" or limits:
        other = f"--{limits[0].replace('_', '-')}" if limits else f"--solver {name}"
        raise UsageError(f"--robust chooses among all answers of --solver fcp, which {other} rules out; leave one out")
    if batches.problem.pipeline is not None:
        raise UsageError("--robust knows no pipelines; leave it out, or plan without --pipeline-parallel")
    from fcp_cli.planning.fcp.robust import RobustSolver
    from fcp_cli.planning.fcp.solver import solver_of

    return RobustSolver(plain=solver_of(batches.problem))
