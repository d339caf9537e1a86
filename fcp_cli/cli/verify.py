"""`fcp verify`: prove on this machine that a plan's gradients are those of one process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcp_cli.cli.command import takes
from fcp_cli.errors import UsageError
from fcp_cli.util.console import new_table, print_json, print_result, print_table, results
from fcp_cli.util.options import MOST_TOKENS, Arg, Opt
from fcp_cli.util.words import counted

if TYPE_CHECKING:
    from fcp_cli.verification.verify import Verification


@takes("fcp verify plan.parquet", "fcp verify plan.parquet --first-step 100 --steps 10")
def verify(
    *,
    path: Annotated[Path | None, Arg("The plan to verify.", metavar="PLAN", unset="plan.parquet")] = None,
    plan: Annotated[
        Path | None, Opt("The plan, instead of the argument.", flags=("--plan",), unset="plan.parquet")
    ] = None,
    steps: Annotated[int, Opt("Steps to replay.", min=1)] = 3,
    first_step: Annotated[int, Opt("First step to replay.", min=0)] = 0,
    max_length: Annotated[
        int, Opt("Scale all lengths down until the longest has this many tokens.", min=1, max=MOST_TOKENS)
    ] = 256,
    json: Annotated[bool, Opt("Print the result as one JSON document on stdout.")] = False,
) -> None:
    """Compare a plan's loss and gradients, in fp64, with one process.

    It replays steps of the plan with a small model on CPU ranks.

    Exit status 0 if no difference exceeds 1e-12 and no operation is out of order, else 1. Run it before trusting a plan
    or a new version of PyTorch. Up to 8 ranks are processes over gloo; more are threads of one process.
    """
    from fcp_cli.plan.file import PlanReader

    if path is not None and plan is not None:
        raise UsageError(f"two plans are given, {path} and --plan {plan}; give one")
    path = path or plan or Path("plan.parquet")
    PlanReader(path)  # refuses a misspelt file before torch is imported
    from fcp_cli.verification.verify import verify as verify_plan

    verification = verify_plan(path, num_steps=steps, first_step=first_step, max_length=max_length)
    if json:
        print_json(_document(verification))
    else:
        _show(verification)
    if not verification.passed:
        raise typer.Exit(1)


def _document(verification: Verification) -> dict[str, Any]:
    from fcp_cli.verification.verify import TOLERANCE

    document = asdict(verification)
    document["plan"] = str(verification.plan)
    for step in document["steps"]:
        step["micro_batches"] = step.pop("microbatches")  # JSON keys keep their first spelling
    return {"passed": verification.passed, "tolerance": TOLERANCE, **document}


def _show(verification: Verification) -> None:
    from fcp_cli.verification.verify import TOLERANCE

    print_result(_how(verification))
    names = ("step", "micro-\nbatches", "largest\ndegree", "tokens", "loss", "loss\ndiffers", "gradient\ndiffers", "")
    table = new_table(*names, left=(7,), pad_edge=True)
    for step in verification.steps:
        table.add_row(
            str(step.step),
            str(step.microbatches),
            str(step.largest_degree),
            f"{step.tokens:,}",
            f"{step.loss:.4f}",
            f"{step.loss_difference:.1e}",
            f"{step.gradient_difference:.1e}",
            "ok" if step.passed else "[bold red]differs[/]",
        )
    print_table(results(), table)
    if verification.order_fault is not None:
        print_result(f"operations out of order: {verification.order_fault}")
    verdict = "passed" if verification.passed else "FAILED"
    print_result(f"{verdict}: differences up to {TOLERANCE:.0e} are allowed; no order of operations may deadlock")


def _how(verification: Verification) -> str:
    ranks = f"{counted(verification.num_ranks, 'rank')} as {verification.ranks_are}"
    if verification.ranks_are == "threads":
        ranks += " of one process (more than 8)"
    if verification.scale < 1.0:
        longest = counted(verification.longest_tokens, "token")
        ranks += f"; lengths scaled by {verification.scale:.3g} to at most {longest}"
    if verification.unknown_masks:
        masked = counted(verification.unknown_masks, "sequence")
        ranks += f"; {masked} with masks are replayed as causal, because the plan does not contain the masks"
    return f"{verification.plan}: {ranks}"
