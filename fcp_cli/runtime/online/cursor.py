"""Follow the steps of a stream from one rank's view, as `runtime.data.cursor` does for a plan file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final, Protocol

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata.online import OnlineSettings, read_online_settings
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.data.cursor import RankStep, RankView
from fcp_cli.runtime.online.source import StreamSource

ONLINE_VARIABLE: Final = "FCP_ONLINE"
_PLAN: Final = "plan.parquet"


class PlansStreams(Protocol):
    """Planner with settings for streams: a `fcp_cli.Planner`."""

    def online(self) -> OnlineSettings: ...


def online_settings(planner: PlansStreams | OnlineSettings | None) -> OnlineSettings:
    """Return the planning settings of a stream: those of the planner, else of `fcp launch --online`."""
    if isinstance(planner, OnlineSettings):
        return planner
    if planner is not None:
        return planner.online()
    path = os.environ.get(ONLINE_VARIABLE)
    if not path:
        raise RunError(
            "a stream needs a planner: pass planner=Planner(...), or start the script with 'fcp launch --online'"
        )
    return read_online_settings(Path(path))


def stream_plan_path(given: str | Path | None) -> Path:
    """Return the path of a stream's plan: the given one, else FCP_PLAN, else `plan.parquet` in the current folder."""
    return Path(given or os.environ.get("FCP_PLAN") or _PLAN)


class StreamCursor:
    """Iterator over this rank's steps of a stream.

    Args:
        source: planner of the steps; opened here.
        rank: global rank.
        first_step: optimizer step to start at.
        end_step: returns the step after the last trained one.
    """

    def __init__(self, source: StreamSource, rank: int, *, first_step: int, end_step: Callable[[], int]) -> None:
        self._source, self._end_step = source, end_step
        self._view = RankView(path=source.path, metadata=source.settings.metadata, rank=rank)
        source.open(first_step)
        self._steps = source.steps()

    def first(self) -> Iterator[StepPlan]:
        """Yield the first step without consuming it; nothing if the stream is empty."""
        step = next(self._steps, None)
        if step is not None:
            self._steps = chain([step], self._steps)
            yield step

    def __iter__(self) -> Iterator[RankStep]:
        return map(self._view.step, self._steps)

    def close(self) -> None:
        """Leave the stream; writes the trained steps as a plan."""
        self._source.close(self._end_step())
