"""A plan as pictures need it: forgiving of changes by an editor or a script.

`plan.check` proves a plan; this reads the drawable part of any, skips steps that no picture could hold, and
lists in `problems` edits of the file and skipped steps.
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

_QUICK_BYTES = 100_000_000  # to hash a larger file takes longer than to show one of its steps should


@dataclass(kw_only=True, slots=True)
class PlanFile:
    """An open plan.

    Attributes:
        problems: one line each, complete once the steps have been read to the end.
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
        """Yield the steps from `first` on that can be shown, in order."""
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
        finally:  # also when the caller has seen enough
            if left_out:
                more = f", and {left_out - 1} more" if left_out > 1 else ""
                self.problems.append(f"{self.path}: left out {reason}{more}")

    def step(self, wanted: int) -> StepPlan:
        """Return one step."""
        with closing(self.steps(wanted)) as steps:
            found = next((step for step in steps if step.step == wanted), None)
        if found is None:
            raise self.nothing_to_show(f"step {wanted}")
        return found

    def manifest(self, paths: Sequence[Path]) -> LengthTable | None:
        """Read the manifests that this plan was made from, or return None without a path."""
        if not paths:
            return None
        table, planned = planned_manifest(self.metadata, paths, length_column="length"), self.metadata.manifest
        if len(table) != planned.rows:
            raise PlanError(
                f"--manifest {paths[0]} has {counted(len(table), 'row')}, but {self.path} was planned from "
                f"{counted(planned.rows, 'row')} of {planned.name}; name that one"
            )
        return table

    def nothing_to_show(self, noun: str = "any step") -> PlanError:
        """Return the error for a plan without `noun`, with the reason that was last found."""
        left_out = [problem.partition("left out ")[2] for problem in self.problems if "left out " in problem]
        reason = f" ({left_out[-1]})" if left_out else ""
        return PlanError(f"{self.path} does not hold {noun} that can be shown{reason}; see: fcp check {self.path}")


def open_plan(path: Path, *, quickly: bool = False) -> PlanFile:
    """Open a plan. If its content does not have the hash that it states, `problems` of the result say so.

    Args:
        path: the plan.
        quickly: skip the check of the hash if the file is large, since it reads the whole file.
    """
    plan = PlanFile(reader=PlanReader(path))
    if quickly and path.stat().st_size > _QUICK_BYTES:
        return plan
    stated = plan.metadata.plan_hash
    if plan.reader.content_hash() != stated:
        plan.problems.append(f"{path} was edited: its hash is not {stated[:12]} any more; see: fcp check {path}")
    return plan


def _unseen(step: StepPlan, metadata: PlanMetadata) -> str | None:
    """Return why no picture can hold a step whose values a plan can have, or None."""
    if not metadata.first_step <= step.step < metadata.end_step:
        return f"the plan ends with step {metadata.end_step - 1}"
    if min(step.makespan_seconds, step.bound_seconds) <= 0:
        return "it takes no time"
    return None
