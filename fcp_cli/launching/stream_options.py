"""The options of `fcp launch --online`, and their refusal without it. Imports no planner."""

from __future__ import annotations

from typing import Final

from fcp_cli.errors import UsageError
from fcp_cli.launching.request import LaunchRequest

STREAM_OPTIONS: Final = ("ahead", "stream_begins", "refit_every")


def refuse_without_online(request: LaunchRequest, *, has_profile: bool = False) -> None:
    """Refuse options of streams; a job whose loop has its plan made may have a profile."""
    for name in (name for name in (*STREAM_OPTIONS, "reorder_window") if getattr(request, name) is not None):
        raise UsageError(f"--{name.replace('_', '-')} is for --online; a plan is made before its run")
    names = (*(() if has_profile else ("profile",)), "global_batch_size", "global_batch_tokens")
    given = {name: getattr(request, name) for name in names}
    for name in (name for name, value in given.items() if value is not None):
        flag = name.replace("_", "-")
        raise UsageError(f"--{flag} is for --online; a plan has its own: fcp plan MANIFEST --{flag} ...")
