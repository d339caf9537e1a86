"""The headers of a run's checkpoints. Imports no torch: `fcp plan` and `fcp launch` read them, too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.reading.documents import read_object
from fcp_cli.validation import Count, NonNegativeCount, shown, validated

FORMAT = "fcp-checkpoint/2"
PREFIX = "step-"

Sharding = Literal["replicated", "sharded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointHeader:
    """The facts of a checkpoint that must agree with a run before it is loaded, and how it is cut.

    Attributes:
        sharding: whether rank 0 saved everything, or each rank of a copy its share of it.
        shards: how many shares; None, in older checkpoints: as many as ranks.
    """

    step: NonNegativeCount
    plan_hash: str
    num_ranks: Count
    sharding: Sharding
    model: str
    torch: str
    shards: Count | None = None


def checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{PREFIX}*/checkpoint.json"))


def read_header(checkpoint: Path) -> CheckpointHeader:
    """Read the header of a checkpoint.

    Raises:
        RunError: it is damaged or of another format.
    """
    path = checkpoint / "checkpoint.json"
    remedy = f"remove {checkpoint} to resume from the one before"
    try:
        document = read_object(path, error=RunError)
    except RunError as error:
        raise RunError(f"{error}; {remedy}") from error
    found = document.pop("format", None)
    if found != FORMAT:
        raise RunError(f"{path} has format {shown(found)}; this fcp reads {FORMAT!r}")
    return validated(document, CheckpointHeader, where=f"{path} is damaged", error=RunError, remedy=remedy)


def check_header(header: CheckpointHeader, wanted: CheckpointHeader, plan: PlanMetadata, *, checkpoint: Path) -> None:
    """Refuse to resume under another plan, number of ranks or model; a plan may continue another's.

    Any sharding may follow any other: what a rank keeps is cut out of what was saved.

    Args:
        header: of the checkpoint.
        wanted: of the one that the run would save now.
        plan: that is to be followed now.
        checkpoint: for messages.

    Raises:
        RunError: names what differs.
    """
    check_plan_of(header, plan, checkpoint=checkpoint)
    same_plan = header.plan_hash == plan.plan_hash
    for name in ("num_ranks", "model") if same_plan else ("model",):
        then, now = getattr(header, name), getattr(wanted, name)
        if then != now:
            raise RunError(
                f"{checkpoint} was made with {name.replace('_', ' ')} {then}, but this run has {now}; "
                "start a new run without --resume"
            )


def check_plan_of(header: CheckpointHeader, plan: PlanMetadata, *, checkpoint: Path) -> None:
    """Check that a checkpoint belongs to a plan: the one it was made under, or one that continues from exactly there.

    Raises:
        RunError: it does not.
    """
    if header.plan_hash == plan.plan_hash:
        return
    continues = plan.continues
    if continues is None or continues.plan_hash != header.plan_hash:
        raise RunError(
            f"{checkpoint} was made under the plan {header.plan_hash[:12]}, but this one is {plan.plan_hash[:12]}; "
            "resume with that plan, or start a new run without --resume"
        )
    if continues.first_step != header.step:
        raise RunError(
            f"{checkpoint} has finished {header.step} steps, but the plan {plan.plan_hash[:12]} continues from step "
            f"{continues.first_step}; make it again with 'fcp plan --continue-from {checkpoint.parent.parent} --ranks "
            f"{plan.num_ranks}'"
        )
