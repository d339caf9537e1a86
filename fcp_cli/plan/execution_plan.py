"""Writes a plan in the words of Megatron-LM's planning interface, for runtimes that take their plan from there.

The interface is `megatron.core.datasets.sequence_packing` as NVIDIA/Megatron-LM#5612 proposes it (commit cb2a9aab67 of
July 2026): dataclasses, which "offline planners" may fill, and no file. So the file is ours, JSON Lines: a header with
the rank groups, then a line per optimizer step with its packs and its `ExecutionPlan`. Mappings have the names of the
dataclasses' fields, and fields at their defaults may be missing.

An `ExecutionGroup` holds assignments that can run together. Under `microbatch` that is a wave, with a barrier after it;
under `iteration` micro-batches are levelled into such groups without barriers: each rank keeps the order of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fcp_cli.errors import UsageError
from fcp_cli.files import replaced_atomically
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.pricing.padding import padded_tokens
from fcp_cli.plan.step import MicroBatch, StepPlan, level_waves

FORMAT: Final = "fcp-execution-plan/1"
INTERFACE: Final = "NVIDIA/Megatron-LM#5612 at cb2a9aab67"

Document = dict[str, Any]
Groups = dict[tuple[int, ...], str]


def refuse_inexpressible(*, attention: str | None, encoder_balance: str | None, truncates: bool) -> None:
    """Refuse a plan with a feature without a field in the interface, which a runtime would ignore in silence.

    Args:
        attention: how groups split heads; None: they do not.
        encoder_balance: who shares a vision encoder's work; None: the ranks of a ring.
        truncates: whether sequences were cut to a length.
    """
    no_field = "Megatron's execution plan has no field for"
    if attention is not None:
        raise UsageError(f"{no_field} groups that share heads (--attention {attention}); plan with --attention ring")
    if encoder_balance is not None:
        raise UsageError(f"{no_field} encoder work shared by a {encoder_balance}; plan with --encoder-balance ring")
    if truncates:
        raise UsageError(f"{no_field} sequences that are cut (--overlong truncate); plan with --overlong drop")


def write_execution_plan(plan: Path, output: Path) -> None:
    """Write a plan file's content as a Megatron execution plan; equal plans make equal files.

    Args:
        plan: a whole plan, which is read twice: its groups stand in the header.
        output: replaced when the new one is whole.

    Raises:
        UsageError: the plan has a feature that cannot be expressed.
        PlanError: the plan is missing or damaged.
        FcpError: the file cannot be written.
    """
    reader = PlanReader(plan)
    metadata = reader.metadata
    refuse_inexpressible(
        attention=metadata.attention,
        encoder_balance=metadata.encoder_balance,
        truncates=metadata.overlong.policy == "truncate",
    )
    groups = _named_groups(reader)
    with replaced_atomically(output) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(_line(_header(metadata, groups)))
        for step in reader.steps():
            file.write(_line(_step_document(step, metadata, groups)))


def _line(document: Document) -> str:
    return json.dumps(document, separators=(",", ":")) + "\n"


def _named_groups(reader: PlanReader) -> Groups:
    """Name the plan's groups of degree > 1: cp4_0 is the first of four ranks, in the order of their ranks."""
    found = {group.ranks for step in reader.steps() for group in step.ring_groups()}
    names: Groups = {}
    count: dict[int, int] = {}
    for ranks in sorted(found, key=lambda ranks: (len(ranks), ranks)):
        number = count.get(len(ranks), 0)
        count[len(ranks)] = number + 1
        names[ranks] = f"cp{len(ranks)}_{number}"
    return names


def _header(metadata: PlanMetadata, groups: Groups) -> Document:
    return {
        "format": FORMAT,
        "interface": INTERFACE,
        "plan_hash": metadata.plan_hash,
        "first_step": metadata.first_step,
        "steps": metadata.steps,
        "resources": {  # PlacementResources
            "dp_size": metadata.num_ranks,  # context parallel 1: the plan makes its groups of data-parallel ranks
            "tp_size": metadata.tensor_parallel,
            "pp_size": metadata.pipeline_parallel,
            "rank_groups": {name: {"group_id": name, "ranks": ranks} for ranks, name in groups.items()},
        },
    }


def _step_document(step: StepPlan, metadata: PlanMetadata, groups: Groups) -> Document:
    rows = list(step.microbatches())
    levels = list(_levels(rows))
    return {
        "step": step.step,
        "packs": [_pack(row, metadata.padding_multiple) for row in rows if not row.is_idle],
        "plan": {  # ExecutionPlan
            "groups": [
                {
                    "group_id": number,
                    "assignments": [_assignment(row, groups) for row in level],
                    "requires_barrier_after": metadata.sync == "microbatch",
                }
                for number, level in enumerate(levels)
            ],
            "num_microbatches": len(levels),
            "total_tokens": int(step.lengths.sum(dtype="int64")),
            "sequence_square_sum": sum(length * length for length in step.lengths.tolist()),
            "metadata": {"makespan_seconds": step.makespan_seconds, "bound_seconds": step.bound_seconds},
        },
    }


def _levels(rows: list[MicroBatch]) -> Iterator[list[MicroBatch]]:
    """Yield micro-batches that can run together: each in the first level after those of its ranks.

    Idle ones are dropped, as the interface has no empty packs: a rank in no assignment of a group is idle there.
    """
    level_of = level_waves(row.ranks for row in rows)
    levels: list[list[MicroBatch]] = [[] for _ in range(max(level_of) + 1)]
    for row, level in zip(rows, level_of, strict=True):
        if not row.is_idle:
            levels[level].append(row)
    return (level for level in levels if level)


def _pack(row: MicroBatch, padding: int | None) -> Document:
    pack: Document = {"pack_id": row.order, "sample_ids": row.sequences, "sequence_lengths": row.lengths}
    if padding is not None:
        pack["padded_sequence_lengths"] = padded_tokens(row.lengths, row.degree, padding).tolist()
    return pack


def _assignment(row: MicroBatch, groups: Groups) -> Document:
    assignment: Document = {
        "pack_id": row.order,
        "placement_kind": "data_parallel" if row.degree == 1 else "dynamic_cp",
        "executor_ranks": row.ranks,
        "local_cp_size": row.degree,
    }
    if row.degree > 1:
        assignment["rank_group_id"] = groups[row.ranks]
    return assignment
