"""The one call through which Megatron runs a step's forwards and backwards: it gets the plan's micro-batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcp_cli.runtime.integrations.megatron.stack import Stack

_HOOKED = "get_forward_backward_func"


def hook_schedules(schedules: ModuleType) -> None:
    """Called when `megatron.core.pipeline_parallel.schedules` has been imported, before its importer sees it.

    Scripts get a schedule from `get_forward_backward_func` and call it once per training step, with keyword arguments;
    what they get from now on runs the plan's micro-batches. Evaluation (`forward_only`) is left as it is.
    """
    _check(schedules)
    get_schedule = getattr(schedules, _HOOKED)
    hook = _Hook()

    @wraps(get_schedule)
    def get_planned_schedule(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        schedule: Callable[..., Any] = get_schedule(*args, **kwargs)

        @wraps(schedule)
        def run(**arguments: Any) -> Any:
            if arguments.get("forward_only"):
                return schedule(**arguments)
            return hook.run(schedule, arguments)

        return run

    setattr(schedules, _HOOKED, get_planned_schedule)


def _check(schedules: ModuleType) -> None:
    if _is_under_mindspeed():
        from fcp_cli.runtime.integrations.mindspeed.checks import check_schedules
    else:
        from fcp_cli.runtime.integrations.megatron.checks import check_schedules

    check_schedules(schedules)


def _is_under_mindspeed() -> bool:
    """Scripts import it before Megatron. It must not be imported here: it reads the command line as it is imported."""
    return "mindspeed" in sys.modules


def _stack() -> Stack:
    if _is_under_mindspeed():
        from fcp_cli.runtime.integrations.mindspeed.stack import MindSpeedStack

        return MindSpeedStack()
    from fcp_cli.runtime.integrations.megatron.stack import MegatronStack

    return MegatronStack()


class _Hook:
    """Makes the follower when the first step is run: then the process group, the model and the data exist."""

    def __init__(self) -> None:
        self._follower: Any = None

    def run(self, schedule: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        from fcp_cli.runtime.integrations.megatron.follow import Follower

        if self._follower is None:
            self._follower = Follower(Path(os.environ["FCP_PLAN"]), arguments, _stack())
        follower: Follower = self._follower
        return follower.run(schedule, arguments)
