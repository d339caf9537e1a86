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

    Lower bounds are proven again if this fcp made the plan. With the manifest, also the batches of its seed, and one
    step by its solver.

    Exit status 0 if the plan is sound, else 1.
    """
    gc.disable()  # nothing becomes garbage, and searching for it takes a quarter of the time
    try:
        from fcp_cli.plan.check import check_plan
        from fcp_cli.plan.file import PlanReader
        from fcp_cli.planning.batches import planned_manifest

        metadata = PlanReader(plan).metadata
        table = planned_manifest(metadata, manifest, length_column=length_column) if manifest else None
        findings = list(islice(check_plan(plan, manifest=table), _MOST_SHOWN))
        unproven: dict[str, str] = {}
        proven = 0
        if not findings:
            from fcp_cli.planning import proving

            unproven, proven = proving.unproven(metadata, table), proving.MOST_PROVEN
            findings = list(islice(proving.prove_again(plan, table, without=unproven), _MOST_SHOWN))
    finally:
        gc.freeze()  # nor do the modules at exit
        gc.enable()
    if json:
        shown = [{"step": f.step, "order": f.order, "message": f.message} for f in findings]
        print_json(
            {
                "plan": str(plan),
                "plan_hash": metadata.plan_hash,
                "sound": not findings,
                "findings": shown,
                "bounds_not_proven_again": unproven.get("bounds"),
                "solver_not_proven_again": unproven.get("solver"),
            }
        )
    for finding in findings if not json else ():
        print_result(f"{plan}: {finding}")
    if findings:
        raise typer.Exit(1)
    if json:
        return
    if unproven:
        parts = "bounds and solver" if "bounds" in unproven else "solver" if manifest else "batches and solver"
        print_result(f"{plan}: {parts} not proven again: {unproven['solver']}")
    bounds = "bounds" if metadata.steps <= proven else f"bounds of {proven} steps"
    solver = "" if "solver" in unproven else " and solver"
    last = "" if "bounds" in unproven else f", {bounds}{solver} proven again"
    print_result(f"{plan} is sound: {counted(metadata.steps, 'step')}, hash {metadata.plan_hash[:16]}{last}")
