"""Passes the plan's micro-batches to the call through which Megatron runs a step's forward and backward passes.

It is above the `megatron` and `mindspeed` folders because it chooses between them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcp_cli.integrations.megatron.follow import Follower
    from fcp_cli.integrations.megatron.model import MegatronStack

_HOOKED = "get_forward_backward_func"


def hook_schedules(schedules: ModuleType) -> None:
    """Hook Megatron's schedules to run the plan's micro-batches.

    To be called when `megatron.core.pipeline_parallel.schedules` has been imported, before its importer sees it.
    Scripts get a schedule from `get_forward_backward_func` and call it once per training step, with keyword arguments.
    Evaluation (`forward_only`) is unchanged.
    """
    # Scripts import MindSpeed before Megatron. We must not import it: its import reads the command line.
    is_under_mindspeed = "mindspeed" in sys.modules
    if is_under_mindspeed:
        from fcp_cli.integrations.mindspeed.checks import check_schedules
    else:
        from fcp_cli.integrations.megatron.checks import check_schedules

    check_schedules(schedules)
    get_schedule = getattr(schedules, _HOOKED)
    follower: Follower | None = None

    def get_follower(arguments: dict[str, Any]) -> Follower:
        """Create the follower at the first step, when the process group, the model and the data exist."""
        nonlocal follower
        if follower is None:
            from fcp_cli.integrations.megatron.follow import Follower

            follower = Follower(
                Path(os.environ["FCP_PLAN"]), arguments, _make_stack(is_under_mindspeed, arguments["model"])
            )
        return follower

    @wraps(get_schedule)
    def get_planned_schedule(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        schedule: Callable[..., Any] = get_schedule(*args, **kwargs)

        @wraps(schedule)
        def run(**arguments: Any) -> Any:
            if arguments.get("forward_only"):
                return schedule(**arguments)
            return get_follower(arguments).run(schedule, arguments)

        return run

    setattr(schedules, _HOOKED, get_planned_schedule)


def _make_stack(is_under_mindspeed: bool, model: Any) -> MegatronStack:
    if is_under_mindspeed:
        from megatron.core.utils import get_model_config

        from fcp_cli.integrations.mindspeed.stack import MindSpeedStack

        first = model[0] if isinstance(model, list) else model
        return MindSpeedStack(get_model_config(first))
    from fcp_cli.integrations.megatron.model import MegatronStack

    return MegatronStack()
