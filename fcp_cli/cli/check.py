"""`fcp check`: prove that a plan satisfies every rule of its format."""

from __future__ import annotations

import gc
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from fcp_cli.cli.command import takes
from fcp_cli.util.console import print_json, print_result
from fcp_cli.util.options import Arg, Opt
from fcp_cli.util.words import counted

_MOST_SHOWN = 10


@takes("fcp check", "fcp check plan.parquet --manifest lengths.parquet")
def check(
    *,
    plan: Annotated[Path, Arg("The plan to check.")] = Path("plan.parquet"),
    manifest: Annotated[
        tuple[Path, ...], Opt("The plan's manifest, to check lengths and all times; once per source of a mixture.")
    ] = (),
    length_column: Annotated[str, Opt("Column of the manifest with lengths.")] = "length",
    json: Annotated[bool, Opt("Print the findings as one JSON document on stdout.")] = False,
) -> None:
    """Check a plan: order, coverage, token budget, times, bounds, hash.

    Lower bounds are proven again if this fcp made the plan. With the manifest, also the batches of its seed.

    Exit status 0 if the plan is sound, else 1.
    """
    from fcp_cli.plan.check import check_plan
    from fcp_cli.plan.file import PlanReader
    from fcp_cli.planning.batches import planned_manifest

    metadata = PlanReader(plan).metadata
    table = planned_manifest(metadata, manifest, length_column=length_column) if manifest else None
    gc.disable()  # objects of the compiled planner stay: collecting while it is loaded takes a fifth of the time
    try:
        findings = list(islice(check_plan(plan, manifest=table), _MOST_SHOWN))
        why_unproven, proven = "", 0
        if not findings:
            from fcp_cli.planning.proving import MOST_PROVEN, prove_again, unproven

            why_unproven, proven = unproven(metadata, table), MOST_PROVEN
            findings = list(islice(prove_again(plan, table, bounds=not why_unproven), _MOST_SHOWN))
    finally:
        gc.enable()
    if json:
        shown = [{"step": f.step, "order": f.order, "message": f.message} for f in findings]
        print_json(
            {
                "plan": str(plan),
                "plan_hash": metadata.plan_hash,
                "sound": not findings,
                "findings": shown,
                "bounds_not_proven_again": why_unproven or None,
            }
        )
    for finding in findings if not json else ():
        print_result(f"{plan}: {finding}")
    if findings:
        raise typer.Exit(1)
    if json:
        return
    if why_unproven:
        print_result(f"{plan}: bounds not proven again: {why_unproven}")
    bounds = "bounds" if metadata.steps <= proven else f"bounds of {proven} steps"
    last = "" if why_unproven else f", {bounds} proven again"
    print_result(f"{plan} is sound: {counted(metadata.steps, 'step')}, hash {metadata.plan_hash[:16]}{last}")
