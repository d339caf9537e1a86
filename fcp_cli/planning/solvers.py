"""Registry of solvers: fcp's own, imported lazily, and those of other packages (entry points `fcp.solvers`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, TypeAlias, cast

from fcp_cli.cost.profile import CostProfile
from fcp_cli.cost.recipe import SplitAttention
from fcp_cli.errors import FcpError, UsageError
from fcp_cli.planning.assemble import BrokenAssignmentError, check_assignment
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import FunctionSolver
from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver
from fcp_cli.util.plugins import Plugin, Registry

SolverFactory: TypeAlias = Callable[[GlobalBatches], Solver]
"""Makes a solver for one plan. It may read the plan's batches to tune itself once, as `static` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A solver's factory, and facts that commands need before importing it.

    Attributes:
        factory: the factory, as module:function.
        options: options of the factory besides the batches.
        attention: the `--attention` that it needs for its groups; None: rings, or for fcp any value.
        knows_sync: whether its plans differ between the syncs.
        is_quick: whether `fcp compare` runs it by default.
        own_execution: whether it prices an execution that fcp cannot run, from the bytes of queries and keys: a
            reference for plans, not a competitor.
        plans: whether it makes plans that can be trained; if not, it is only for `fcp compare`.
    """

    factory: str
    options: frozenset[str] = frozenset()
    attention: SplitAttention | None = None
    knows_sync: bool = True
    is_quick: bool = True
    own_execution: bool = False
    plans: bool = True


_PUBLISHED: Final = "fcp_cli.planning.strategies"


def _unplanned(module: str) -> Strategy:
    """Return the facts of a published strategy whose execution a plan of rings cannot express."""
    return Strategy(factory=f"{_PUBLISHED}.{module}:make_solver", is_quick=False, own_execution=True, plans=False)


_OWN: Final[Mapping[str, Strategy]] = {
    "fcp": Strategy(
        factory="fcp_cli.planning.fcp_solver:make_solver",
        options=frozenset({"max_degree", "max_groups", "max_peers"}),
    ),
    "block-fcp": _unplanned("block_fcp"),
    "bytescale": Strategy(factory=f"{_PUBLISHED}.bytescale:make_solver"),
    "deepspeed-ulysses": Strategy(factory=f"{_PUBLISHED}.split_heads:make_ulysses", attention="ulysses"),
    "distca": _unplanned("distca"),
    "fcp-paper": Strategy(factory=f"{_PUBLISHED}.fcp_paper:make_solver"),
    "flexsp": Strategy(
        factory=f"{_PUBLISHED}.flexsp:make_solver",
        options=frozenset({"milp_seconds"}),
        knows_sync=False,  # it plans waves
        is_quick=False,  # minutes a step
    ),
    "hydraulis": Strategy(factory=f"{_PUBLISHED}.hydraulis:make_solver", is_quick=False),
    "karmarkar-karp": Strategy(factory=f"{_PUBLISHED}.karmarkar_karp:make_solver"),
    "magi-attention": _unplanned("magi_attention"),
    "megatron-any-degree": Strategy(factory=f"{_PUBLISHED}.megatron_packing:make_any_degree"),
    "megatron-dynamic-cp": Strategy(factory=f"{_PUBLISHED}.megatron_dynamic_cp:make_solver"),
    "megatron-packing": Strategy(factory=f"{_PUBLISHED}.megatron_packing:make_solver"),
    "packing": Strategy(factory=f"{_PUBLISHED}.row_packing:make_solver"),
    "padded": Strategy(factory="fcp_cli.planning.padded:make_solver", plans=False),
    "skrull": _unplanned("skrull"),
    "static": Strategy(factory="fcp_cli.planning.static:make_solver"),
    "usp": Strategy(factory=f"{_PUBLISHED}.split_heads:make_usp", attention="2d"),
    "wlb-llm": Strategy(factory=f"{_PUBLISHED}.wlb_llm:make_solver"),
    "zeppelin": _unplanned("zeppelin"),
}
_OF_PLUGINS: Final = Strategy(factory="")
REGISTRY: Final = Registry("fcp.solvers", "solver", "--solver", tuple(name for name, own in _OWN.items() if own.plans))
DEFAULT: Final = "fcp"


def solver_names() -> list[str]:
    """Return the names of all solvers, the default first."""
    return REGISTRY.names()


def strategy(name: str) -> Strategy:
    """Return the registered facts of a solver, or the defaults for a solver of another package."""
    return _OWN.get(name, _OF_PLUGINS)


def compared_names() -> list[str]:
    """Return the names of all strategies of `fcp compare`: the solvers, then baselines without a plan."""
    return list(dict.fromkeys([*solver_names(), *(name for name, own in _OWN.items() if not own.plans)]))


def works_under(name: str, profile: CostProfile) -> bool:
    """Return whether a strategy can be priced: the profile prices heads, or the strategy needs no such price."""
    known = strategy(name)
    return profile.heads is not None or not (known.attention or known.own_execution)


def make_solver(name: str, batches: GlobalBatches, **options: Any) -> Solver:
    """Make the named solver for these batches.

    Args:
        name: one of `solver_names()`.
        batches: the batches to plan.
        options: options of the solver's factory, by name; None and False count as not given.

    Raises:
        UsageError: the solver does not take an option.
    """
    given = {option: value for option, value in options.items() if value is not None and value is not False}
    plugin = _require_known(name, given)
    if plugin is not None:
        return _solver_of(plugin, batches)
    module, factory = strategy(name).factory.split(":")
    return cast(Solver, getattr(import_module(module), factory)(batches, **given))


def make_planning_solver(name: str, batches: GlobalBatches, **options: Any) -> Solver:
    """Make the named solver for a plan to be trained; raise UsageError if it makes no plans. See `make_solver`."""
    require_planning_solver(name, **options)
    return make_solver(name, batches, **options)


def require_planning_solver(name: str, **options: Any) -> None:
    """Check, before batches exist, that the named solver is known, makes plans and takes these options."""
    if not strategy(name).plans:
        raise UsageError(f"--solver {name} makes no plan; 'fcp compare MANIFEST --solvers fcp,{name}' prices it")
    _require_known(name, [option for option, value in options.items() if value is not None])


def _require_known(name: str, options: Iterable[str]) -> Plugin | None:
    """Return the plug-in of this name, or None for fcp's own; raise if neither exists or an option is not taken."""
    plugin = None if name in _OWN else REGISTRY.plugin(name)
    for option in options:
        if option not in strategy(name).options:
            known = " or ".join(one for one, own in _OWN.items() if option in own.options)
            raise UsageError(f"--{option.replace('_', '-')} works with --solver {known} only, not with {name}")
    return plugin


def _solver_of(plugin: Plugin, batches: GlobalBatches) -> Solver:
    factory = plugin.load()
    try:
        solver = factory(batches)
        if not callable(solver.assign):
            raise TypeError("the solver's assign is no method")
        options = dict(solver.options)
        json.dumps(options, allow_nan=False)
        ForkingPickler.dumps(solver)  # must be picklable: planning processes get copies
    except FcpError:
        raise
    except (Exception, SystemExit) as error:
        raise plugin.error(f"made no solver with {plugin.entry.value}", error) from error
    return FunctionSolver(
        name=plugin.name,
        problem=batches.problem,
        rule=partial(_checked, plugin.name, solver),
        options={**options, "package": plugin.package},
    )


def _checked(name: str, solver: Solver, batch: Batch, problem: Problem) -> Assignment:
    """Plan a step with a plug-in's solver; turn any failure into a one-line error that names the plug-in."""
    try:
        found = solver.assign(batch)
        check_assignment(found, batch, problem)
    except FcpError:
        raise
    except BrokenAssignmentError as error:
        rule = str(error).removeprefix("defect in a solver: ").removeprefix(f"step {batch.step}: ")
        raise REGISTRY.plugin(name).error(f"planned step {batch.step} against the rules: {rule}") from error
    except (Exception, SystemExit) as error:
        raise REGISTRY.plugin(name).error(f"failed in step {batch.step}", error) from error
    return found
