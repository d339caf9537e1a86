"""A plan in the words of Megatron-LM's planning interface."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import UsageError
from fcp_cli.plan.execution_plan import refuse_inexpressible, write_execution_plan
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.plan_metadata import OverlongReport, Sync
from fcp_cli.plan.pricing.padding import padded_tokens
from tests.plan.plans import rewritten, small_plan
from tests.planning.examples import table_of

Document = dict[str, Any]


def emitted(plan: Path) -> tuple[Document, list[Document]]:
    output = plan.with_suffix(".execution.jsonl")
    write_execution_plan(plan, output)
    header, *steps = (json.loads(line) for line in output.read_text().splitlines())
    return header, steps


def test_a_step_is_packs_and_groups_of_assignments(tmp_path: Path) -> None:
    plan = small_plan(
        tmp_path / "plan.parquet",
        table=table_of([20_000, 8_000, 100, 200]),
        epochs=1,
        global_batch_size=4,
        shuffle=False,
    )
    header, steps = emitted(plan)
    metadata = PlanReader(plan).metadata
    assert (header.pop("plan_hash"), len(steps)) == (metadata.plan_hash, 1)
    assert header == snapshot(
        {
            "format": "fcp-execution-plan/1",
            "interface": "NVIDIA/Megatron-LM#5612 at cb2a9aab67",
            "first_step": 0,
            "steps": 1,
            "resources": {
                "dp_size": 16,
                "tp_size": 1,
                "pp_size": 1,
                "rank_groups": {
                    "cp3_0": {"group_id": "cp3_0", "ranks": [13, 14, 15]},
                    "cp13_0": {"group_id": "cp13_0", "ranks": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]},
                },
            },
        }
    )
    seconds = steps[0]["plan"].pop("metadata")
    assert seconds["makespan_seconds"] >= seconds["bound_seconds"] > 0
    assert steps[0] == snapshot(
        {
            "step": 0,
            "packs": [
                {"pack_id": 0, "sample_ids": [0, 3], "sequence_lengths": [20000, 200]},
                {"pack_id": 1, "sample_ids": [1, 2], "sequence_lengths": [8000, 100]},
            ],
            "plan": {
                "groups": [
                    {
                        "group_id": 0,
                        "assignments": [
                            {
                                "pack_id": 0,
                                "placement_kind": "dynamic_cp",
                                "executor_ranks": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
                                "local_cp_size": 13,
                                "rank_group_id": "cp13_0",
                            },
                            {
                                "pack_id": 1,
                                "placement_kind": "dynamic_cp",
                                "executor_ranks": [13, 14, 15],
                                "local_cp_size": 3,
                                "rank_group_id": "cp3_0",
                            },
                        ],
                        "requires_barrier_after": False,
                    }
                ],
                "num_microbatches": 1,
                "total_tokens": 28300,
                "sequence_square_sum": 464050000,
            },
        }
    )


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_every_rank_runs_its_packs_in_the_plan_s_order_and_once_per_group(tmp_path: Path, sync: Sync) -> None:
    plan = small_plan(tmp_path / "plan.parquet", sync)
    header, steps = emitted(plan)
    groups = header["resources"]["rank_groups"]
    for step, document in zip(PlanReader(plan).steps(), steps, strict=True):
        packs = {pack["pack_id"]: pack["sample_ids"] for pack in document["packs"]}
        found: dict[int, list[Any]] = {rank: [] for rank in range(16)}
        for group in document["plan"]["groups"]:
            ranks = [rank for assignment in group["assignments"] for rank in assignment["executor_ranks"]]
            assert len(ranks) == len(set(ranks))
            assert group["requires_barrier_after"] == (sync == "microbatch")
            for assignment in group["assignments"]:
                named = groups.get(assignment.get("rank_group_id"), {"ranks": assignment["executor_ranks"][:1]})
                assert named["ranks"] == assignment["executor_ranks"]
                assert len(named["ranks"]) == assignment["local_cp_size"]
                for rank in assignment["executor_ranks"]:
                    found[rank].append(packs[assignment["pack_id"]])
        assert found == {rank: [pack for pack in step.packs_of(rank) if pack] for rank in range(16)}
        if sync == "microbatch":
            assert len(document["plan"]["groups"]) == max(step.wave) + 1


def test_the_padding_of_rings_of_equal_chunks_is_a_length_of_its_own(tmp_path: Path) -> None:
    _, steps = emitted(rewritten(small_plan(tmp_path / "plan.parquet"), padding_multiple=2))
    degrees = {
        (number, assignment["pack_id"]): assignment["local_cp_size"]
        for number, step in enumerate(steps)
        for group in step["plan"]["groups"]
        for assignment in group["assignments"]
    }
    for number, step in enumerate(steps):
        for pack in step["packs"]:
            padded = padded_tokens(pack["sequence_lengths"], degrees[number, pack["pack_id"]], 2)
            assert pack["padded_sequence_lengths"] == padded.tolist()


def test_what_the_interface_has_no_field_for_is_refused(tmp_path: Path) -> None:
    plan = rewritten(small_plan(tmp_path / "plan.parquet"), overlong=OverlongReport(policy="truncate", max_length=9))
    with pytest.raises(UsageError) as caught:
        emitted(plan)
    assert str(caught.value) == snapshot(
        "Megatron's execution plan has no field for sequences that are cut (--overlong truncate); plan with --overlong drop"
    )
    assert not plan.with_suffix(".execution.jsonl").exists()
    for lacking, message in (
        ({"attention": "2d"}, "groups that share heads"),
        ({"encoder_balance": "wave"}, "encoder work shared by a wave"),
    ):
        with pytest.raises(UsageError, match=message):
            refuse_inexpressible(**{"attention": None, "encoder_balance": None, "truncates": False, **lacking})  # type: ignore[arg-type]


def _interface() -> Any:
    source = Path(os.environ.get("FCP_MEGATRON_LM_SOURCE", ""), "megatron/core/datasets/sequence_packing/api.py")
    if not source.is_file():
        pytest.skip("opt-in: FCP_MEGATRON_LM_SOURCE names a checkout of NVIDIA/Megatron-LM#5612")
    spec = importlib.util.spec_from_file_location("sequence_packing_api", source)
    assert spec is not None and spec.loader is not None
    api = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = api  # its dataclasses look themselves up there
    spec.loader.exec_module(api)
    return api


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_megatron_s_own_dataclasses_take_it_and_count_what_the_plan_counts(tmp_path: Path, sync: Sync) -> None:
    api = _interface()
    plan = small_plan(tmp_path / "plan.parquet", sync)
    header, steps = emitted(plan)
    resources = header["resources"]
    groups = {name: api.RankGroup(**group) for name, group in resources.pop("rank_groups").items()}
    assert api.PlacementResources(**resources, rank_groups=groups).dp_size == 16
    for step, document in zip(PlanReader(plan).steps(), steps, strict=True):
        packs = [api.PackDescriptor(**pack) for pack in document["packs"]]
        fields = document["plan"]
        made = api.ExecutionPlan(
            **{**fields, "groups": [_execution_group(api, group) for group in fields["groups"]]},
        )
        assert sorted(made.pack_ids) == [pack.pack_id for pack in packs]
        assert made.assignment_count == int((~step.is_idle).sum())
        assert made.total_tokens == sum(pack.total_tokens for pack in packs)
        of_ranks = {a.rank_group_id: a.executor_ranks for g in made.groups for a in g.assignments if a.rank_group_id}
        assert of_ranks == {name: groups[name].ranks for name in of_ranks}


def _execution_group(api: Any, group: Document) -> Any:
    assignments = [
        api.PackAssignment(**{**assignment, "placement_kind": api.PlacementKind(assignment["placement_kind"])})
        for assignment in group["assignments"]
    ]
    return api.ExecutionGroup(**{**group, "assignments": assignments})
