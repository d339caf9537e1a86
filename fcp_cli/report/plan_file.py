"""Tolerant plan reader for displays.

`plan.check` verifies a plan strictly. This reads what can be displayed, skips broken steps, and lists edits and skipped
steps in `problems`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from fcp_cli.errors import PlanError
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batching.mixing import planned_manifest
from fcp_cli.words import counted

_QUICK_BYTES = 100_000_000  # hashing a larger file would take too long to show one step


@dataclass(kw_only=True, slots=True)
class PlanFile:
    """An open plan.

    Attributes:
        problems: one line per problem; complete once `steps` is exhausted.
    """

    reader: PlanReader
    problems: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def metadata(self) -> PlanMetadata:
        return self.reader.metadata

    def steps(self, first: int = 0) -> Generator[StepPlan, None, None]:
        """Yield the displayable steps from `first` on, in order."""
        left_out, reason, before = 0, "", first - 1
        try:
            for step, broken in self.reader.stored_steps(first):
                fault = "out of order" if step.step <= before else _unseen(step, self.metadata)
                if broken is None and fault is None:
                    before = step.step
                    yield step
                else:
                    reason = reason or str(broken or f"step {step.step}: {fault}")
                    left_out += 1
        finally:  # also if the caller stops early
            if left_out:
                more = f", and {left_out - 1} more" if left_out > 1 else ""
                self.problems.append(f"{self.path}: skipped {reason}{more}")

    def step(self, wanted: int) -> StepPlan:
        """Return a step."""
        with closing(self.steps(wanted)) as steps:
            found = next((step for step in steps if step.step == wanted), None)
        if found is None:
            raise self.nothing_to_show(f"step {wanted}")
        return found

    def manifest(self, paths: Sequence[Path]) -> LengthTable | None:
        """Read the manifests of this plan, or return None without a path."""
        if not paths:
            return None
        table, planned = planned_manifest(self.metadata, paths, length_column="length"), self.metadata.manifest
        if len(table) != planned.rows:
            raise PlanError(
                f"--manifest {paths[0]} has {counted(len(table), 'row')}, but {self.path} was planned from "
                f"{counted(planned.rows, 'row')} of {planned.name}; name that one"
            )
        return table

    def nothing_to_show(self, noun: str = "step") -> PlanError:
        """Return the error for a plan without a displayable `noun`, with the latest reason."""
        left_out = [problem.partition("skipped ")[2] for problem in self.problems if "skipped " in problem]
        reason = f" ({left_out[-1]})" if left_out else ""
        return PlanError(f"{self.path} has no displayable {noun}{reason}; see: fcp check {self.path}")


def open_plan(path: Path, *, quickly: bool = False) -> PlanFile:
    """Open a plan; if its content does not match its hash, `problems` says so.

    Args:
        path: the plan.
        quickly: skip hashing if the file is large.
    """
    plan = PlanFile(reader=PlanReader(path))
    if quickly and path.stat().st_size > _QUICK_BYTES:
        return plan
    stated = plan.metadata.plan_hash
    if plan.reader.content_hash() != stated:
        plan.problems.append(f"{path} was edited: its hash is not {stated[:12]} any more; see: fcp check {path}")
    return plan


def _unseen(step: StepPlan, metadata: PlanMetadata) -> str | None:
    """Return why a valid step cannot be displayed, or None."""
    if not metadata.first_step <= step.step < metadata.end_step:
        return f"the plan ends with step {metadata.end_step - 1}"
    if min(step.makespan_seconds, step.bound_seconds) <= 0:
        return "it takes no time"
    return None
