"""The options of `fcp launch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fcp_cli.launching.request import CLUSTERS, LaunchRequest
from fcp_cli.options import Opt


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions(LaunchRequest):
    """The job, and actions in addition to or instead of its start."""

    preflight: Annotated[
        bool,
        Opt("Run all checks of a launch; start nothing.", common=True, group="Check before the start"),
    ] = False
    explain: Annotated[bool, Opt("Print why each variable is set and where it comes from; start nothing.")] = False
    json: Annotated[bool, Opt("Print one JSON document on stdout.")] = False
    output: Annotated[
        Path | None,
        Opt(
            "Write the job's files there; start nothing.",
            flags=("--output", "-o"),
            metavar="DIR",
            group=f"{CLUSTERS}: job files",
            trust="writes",
            common=True,
        ),
    ] = None
    force: Annotated[bool, Opt("Replace existing files.")] = False
