"""Prepare a process for a script under a plan: rank variables, hooks on frameworks, and a check on optimizers."""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import MutableMapping
from functools import wraps
from types import ModuleType, TracebackType
from typing import Any

from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.runtime.data.followed_plans import is_followed
from fcp_cli.runtime.injection.error_file import record_error
from fcp_cli.runtime.injection.imports import after_import
from fcp_cli.runtime.injection.integrations import hooks
from fcp_cli.runtime.injection.ranks import torch_variables

PLAN_VARIABLE = "FCP_PLAN"


def install(environment: MutableMapping[str, str]) -> None:
    """Make this process a rank of a job under a plan. Call it before any framework is imported.

    Args:
        environment: environment of this process; torch's variables are added if msrun started it.
    """
    if not environment.get(PLAN_VARIABLE):
        raise UsageError(f"{PLAN_VARIABLE} names no plan; set it, or start the script with 'fcp launch --plan PLAN'")
    environment.update(torch_variables(environment))
    _write_whole_lines()
    sys.excepthook = _one_line_errors
    after_import(
        {
            "torch.distributed.distributed_c10d": _leave_at_exit,
            "torch.optim.optimizer": _watch_optimizers,
            **hooks(),
        }
    )


def install_beside_ranks() -> None:
    """Make this process raise if it trains: it belongs to a job under a plan but is not a rank."""
    after_import({"torch.optim.optimizer": _refuse_to_train})


def _refuse_to_train(optimizer: ModuleType) -> None:
    by_accelerate = any(name.startswith("ACCELERATE_") for name in os.environ)
    remedy = (
        "without accelerators 'accelerate launch' starts the plan's ranks by '--multi_gpu --num_processes N' alone"
        if by_accelerate
        else "have its launcher start the plan's ranks, as 'torchrun --nproc-per-node N' does"
    )

    def refuse(*_: Any) -> None:
        sys.excepthook = _one_line_errors
        raise RunError(
            f"{sys.argv[0]} trains in a process that is not a rank (RANK is not set), and would train without the plan "
            f"{os.environ.get(PLAN_VARIABLE)}; {remedy}"
        )

    optimizer.register_optimizer_step_pre_hook(refuse)


def _write_whole_lines() -> None:
    """Buffer output by lines, since ranks share a terminal.

    Launchers run `python -u`, with which `print` writes each argument separately.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _watch_optimizers(optimizer: ModuleType) -> None:
    """Verify before each optimizer step that gradients came from the plan.

    The hook is never removed: PyTorch iterates over its hooks while calling them, so none may remove itself.
    """
    optimizer.register_optimizer_step_pre_hook(lambda *_: require_followed())


def _leave_at_exit(distributed: ModuleType) -> None:
    """Destroy the process group at exit, since many scripts forget it; write the metrics before it is destroyed."""
    destroy = distributed.destroy_process_group

    @wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None and (recorder := sys.modules.get("fcp_cli.runtime.metrics.recorder")) is not None:
            recorder.close_all()
        destroy(group)

    for module in (distributed, sys.modules.get("torch.distributed")):  # others may have imported names from it already
        if getattr(module, "destroy_process_group", None) is destroy:
            module.destroy_process_group = destroy_process_group  # type: ignore[union-attr]

    def leave() -> None:
        if not hasattr(sys.modules.get("torch"), "distributed"):
            return  # aborted during the import of torch, which cannot be imported again
        from fcp_cli.runtime.communication.world import leave_process_group

        leave_process_group()

    atexit.register(leave)


def require_followed() -> None:
    """Raise RunError if the script trains but does not follow the plan."""
    from fcp_cli.plan.metadata.job_facts import PLANNED_BY_ITSELF, has_no_plan

    if not is_followed():
        if has_no_plan():
            raise RunError(
                f"{sys.argv[0]} trains without a plan, which fcp makes by itself for {PLANNED_BY_ITSELF} alone; make "
                "one with 'fcp plan MANIFEST', and follow it with --plan (docs/how-to/training-loop.md)"
            )
        raise RunError(
            f"{sys.argv[0]} trains, but nothing in it follows the plan {os.environ.get(PLAN_VARIABLE)}: it neither "
            "iterates over fcp_cli.runtime.steps nor trains through a framework that fcp hooks; "
            "see docs/how-to/training-loop.md, or start it without hooks by 'fcp launch --inject none'"
        )


def _one_line_errors(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print fcp's own errors as one line, since they name the fix, and others with their traceback."""
    record_error(error)
    if isinstance(error, KeyboardInterrupt):
        return  # the process that interrupted the job reports it
    if isinstance(error, FcpError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
