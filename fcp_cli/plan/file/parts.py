"""Parts of a plan: ranges of its steps, planned on several nodes and merged into the plan of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fcp_cli.errors import PlanError, UsageError
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.file.writer import plan_writer
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata, PlanPart


def part_of_steps(text: str, first_step: int, steps: int) -> tuple[PlanPart, int]:
    """Parse `--steps A:B`: return the part of steps A to B - 1, and how many steps it has.

    Args:
        text: the text, as typed; A may be left out (the first step), so may B (up to the last).
        first_step: the first step of the whole plan.
        steps: how many steps the whole plan has.
    """
    begin, _, end = text.partition(":")
    if not all(word.isdecimal() for word in (begin, end) if word):
        raise UsageError(f"--steps is {text!r}; it must be N, the first N steps, or A:B, steps A to B - 1")
    first, last = int(begin or first_step), int(end or first_step + steps)
    if not first_step <= first < last <= first_step + steps:
        raise UsageError(f"--steps {text} is not a range of the plan's steps, {first_step}:{first_step + steps}")
    return PlanPart(first_step=first, whole=steps), last - first


def part_of_shard(text: str, first_step: int, steps: int) -> tuple[PlanPart, int]:
    """Parse `--shard I/N`: return the I-th of N nearly equal parts, and the number of its steps."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise UsageError(f"--shard {text} is not of the form I/N with 1 <= I <= N, for example 3/16")
    if int(count) > steps:
        raise UsageError(f"--shard {text} has more parts than the plan has steps, {steps}; give at most I/{steps}")
    first, last = ((int(index) - 1) * steps // int(count), int(index) * steps // int(count))
    return PlanPart(first_step=first_step + first, whole=steps), last - first


def merge_parts(parts: Sequence[Path], output: Path) -> PlanMetadata:
    """Write the plan of which these are all parts; steps, totals and hash are those of a single process.

    Args:
        parts: the parts in any order.
        output: replaced only when the plan is whole.

    Raises:
        PlanError: a part is missing, given twice, damaged, edited or of another plan.
        FcpError: the plan cannot be written.
    """
    readers = sorted(map(PlanReader, parts), key=lambda reader: reader.metadata.first_step)
    whole = _whole(readers)
    with plan_writer(output, whole) as writer:
        for reader in readers:
            for step in reader.steps():
                writer.append(step)
    return writer.metadata


def _whole(readers: Sequence[PlanReader]) -> PlanMetadata:
    """Return the metadata of the whole plan, before totals and hash, once all parts fit together."""
    first = readers[0]
    if (part := first.metadata.part) is None:
        raise PlanError(f"{first.path} is a whole plan, not a part of one that --shard or --steps A:B made")
    whole = _common(first.metadata)
    due = whole.first_step
    for reader in readers:
        metadata = reader.metadata
        if _common(metadata) != whole or metadata.part is None or metadata.part.whole != part.whole:
            raise PlanError(f"{reader.path} is of another plan than {first.path}: its manifest or its options differ")
        if metadata.first_step < due:
            raise PlanError(f"{reader.path} has step {metadata.first_step}, which another part has, too; give it once")
        if metadata.first_step > due:
            break
        if reader.content_hash() != metadata.plan_hash:
            raise PlanError(f"{reader.path} was edited: its content does not match its hash; plan this part again")
        due = metadata.end_step
    if due != whole.first_step + part.whole:
        following = next((one.metadata.first_step for one in readers if one.metadata.first_step > due), None)
        end = whole.first_step + part.whole if following is None else following
        raise PlanError(f"steps {due} to {end - 1} of {part.whole} are in no part; add the one of --steps {due}:{end}")
    return whole


def _common(metadata: PlanMetadata) -> PlanMetadata:
    """Return what all parts of a plan have in common."""
    size = metadata.global_batch_size if metadata.has_equal_batches else 1  # else the most that a step of a part has
    return replace(metadata, global_batch_size=size, part=None, steps=0, distinct_groups=0, plan_hash="", created="")
