"""The options of `fcp launch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fcp_cli.launching.request import LaunchRequest
from fcp_cli.options import Opt


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions(LaunchRequest):
    """The job, and what to do besides or instead of starting it."""

    explain: Annotated[
        bool, Opt("Print why each variable is set and where it comes from; start nothing.", group="Options")
    ] = False
    preflight: Annotated[bool, Opt("Check everything that a launch needs; start and write nothing.")] = False
    json: Annotated[bool, Opt("Print one JSON document on stdout.")] = False
    output: Annotated[
        Path | None,
        Opt(
            "Write the job's files there; start nothing.",
            flags=("--output", "-o"),
            metavar="DIR",
            group="Clusters",
            trust="writes",
        ),
    ] = None
    force: Annotated[bool, Opt("Replace files that are there already.")] = False
