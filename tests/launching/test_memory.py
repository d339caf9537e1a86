"""What a job needs of the memory that is there: refused where it cannot fit, and where it is not what was planned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.cost.recipe import LayerRecompute, Recipe
from fcp_cli.errors import UsageError
from fcp_cli.launching.checks import profile_model
from fcp_cli.launching.job import Job
from fcp_cli.launching.memory_check import check_recipe_of_plan, host_copies, job_memory, memory_table, rank_memory
from fcp_cli.models.model import load_model
from fcp_cli.plan.file import PlanReader
from fcp_cli.planning import settings as problem_settings
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import resolve
from fcp_cli.training.settings import TrainSettings
from fcp_cli.util.console import Assumptions
from fcp_cli.util.machine import Accelerators, Facts, LocalDevices
from tests.launching.jobs import GPUS, job, local_job, plan_metadata
from tests.runtime.plans import Row, levels_profile, write_plan

H100S = replace(GPUS, device_memory_bytes=80 * 10**9)
PLANNED = Recipe(zero_stage=3, recompute="selective")


def settings_of(model: str, **given: Any) -> TrainSettings:
    return TrainSettings(plan=Path("plan.parquet"), model=model, run_dir=Path("run"), **given)


def on_gpus(model: str = "qwen3-8b", *, recipe: Recipe | None = PLANNED, **given: Any) -> Job:
    """The bundled trainer on eight H100, under a plan of 16,384 tokens a rank."""
    metadata = plan_metadata(
        num_ranks=8, sync="microbatch", tokens_per_rank=given.pop("tokens_per_rank", 16_384), recipe=recipe
    )
    settings = settings_of(model, **given)
    return job("cuda", machine=H100S, metadata=metadata, settings=settings, model=model, num_nodes=1)


def on_cpu(model: str, host_bytes: int, **changed: Any) -> Job:
    small = LocalDevices(device="cpu", num_devices=0, num_cores=2, memory_bytes=host_bytes)
    values = {"settings": settings_of(model), "metadata": plan_metadata(num_ranks=4), **changed}
    return local_job(machine=small, model=model, **values)


def findings(of: Job) -> list[str]:
    return [f"{found.severity}: {without_sizes(found.message)}" for found in rank_memory(of, Facts())]


def without_sizes(message: str) -> str:
    """The figures themselves are the memory model's, which has tests of its own."""
    return re.sub(r"needs [\d.]+", "needs X", message)


def test_every_item_is_counted_and_shown_of_the_devices_memory() -> None:
    need = job_memory(on_gpus(), Facts())
    assert need is not None and findings(on_gpus()) == []
    assert sum(need.items.values()) == pytest.approx(need.total_bytes)
    assert {"gathered weights", "gradients", "optimizer", "communicators"} <= set(need.items)
    table = memory_table(need)
    names, sizes = ([str(cell) for cell in column.cells] for column in table.columns[:2])
    assert names[-2:] == ["in all", "of a device"]
    assert sizes[-2:] == [f"{need.total_bytes / 1e9:.2f}", "80.00"]
    assert sum(map(float, sizes[:-2])) == pytest.approx(float(sizes[-2]), abs=0.05)
    assert need.document()["total_bytes"] == need.total_bytes


def test_what_cannot_fit_a_device_is_refused_with_the_command_that_fits() -> None:
    (message,) = findings(on_gpus(tokens_per_rank=60_000))
    assert message == snapshot(
        "error: plan.parquet lets a rank hold 60,000 tokens, for which qwen3-8b needs X GB under ZeRO-3, bf16, selective recomputation, chunked loss, but a device has 80.0 GB; plan for it with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 60000 --global-batch-size 8 --no-shuffle --solver test --zero 3 --precision bf16 --recompute full --model qwen3-8b --cluster example-8x8 --sync microbatch -o plan-2.parquet"
    )
    (message,) = findings(on_gpus(tokens_per_rank=5_000_000))
    tokens = re.search(r"--tokens-per-rank (\d+)", message)
    assert "--recompute full --offload activations" in message and tokens is not None
    roomier = Recipe(zero_stage=3, recompute="full", offload="activations")
    assert findings(on_gpus(recipe=roomier, tokens_per_rank=int(tokens[1]))) == []


def test_of_a_script_it_is_only_likely() -> None:
    script = replace(on_gpus(tokens_per_rank=60_000), settings=None, model=None, program=("train.py",))
    (message,) = findings(script)
    assert message.startswith("warning: plan.parquet lets a rank hold 60,000 tokens, for which qwen3-8b needs")
    assert job_memory(replace(script, metadata=replace(script.metadata, recipe=None)), Facts()) is None


def test_without_a_device_here_its_memory_is_that_of_the_cost_profile() -> None:
    elsewhere = replace(on_gpus(), machine=replace(H100S, device_memory_bytes=0))
    need = job_memory(elsewhere, Facts())
    assert need is not None and need.capacity_bytes == pytest.approx(64e9)  # of the example cluster
    found = job_memory(elsewhere, Facts(device_memory_bytes=48 * 10**9))
    assert found is not None and found.capacity_bytes == 48e9


def test_a_model_larger_than_the_hosts_memory_is_an_error() -> None:
    host = 2 * 16 * load_model("qwen3-8b").parameters
    each = on_cpu("qwen3-8b", host)
    assert findings(each) == snapshot(
        [
            "error: qwen3-8b needs X GB for weights, gradients and optimizer on 4 ranks, but this machine has 262 GB; try --model qwen3-tiny, or launch on accelerators"
        ]
    )
    in_waves = replace(each, metadata=plan_metadata(num_ranks=4, sync="microbatch"))
    assert findings(in_waves) == []
    assert findings(replace(each, settings=settings_of("qwen3-8b", zero="2"))) == snapshot(
        [
            "error: qwen3-8b needs X GB for weights, gradients and optimizer on 4 ranks, but this machine has 262 GB; try --model qwen3-tiny, or launch on accelerators"
        ]
    )
    assert findings(on_cpu("qwen3-tiny", host)) == []


def test_a_host_without_room_for_the_copies_of_checkpoints_is_warned_of() -> None:
    """12 bytes a parameter of 8.2 billion, on the one node that holds a copy, and beside 16 of each rank on hosts."""

    def warned(of: Job) -> list[str]:
        return [found.message for found in host_copies(of, Facts())]

    small = replace(on_gpus(), machine=replace(H100S, memory_bytes=64 * 10**9))
    assert warned(small) == snapshot(
        [
            "checkpoints of qwen3-8b are copied to the memory of this host, 98 GB for 8 ranks, but it has 64 GB; share a copy out over more nodes, without --shard-ranks"
        ]
    )
    assert warned(replace(small, machine=replace(H100S, memory_bytes=128 * 10**9))) == []
    adapters = replace(small, settings=settings_of("qwen3-8b", lora="r=16"))
    assert warned(adapters) == []
    host = on_cpu("qwen3-8b", 600 * 10**9)
    assert warned(host) == snapshot(
        [
            "checkpoints of qwen3-8b are copied to the memory of this host, 98 GB for 1 rank in addition to the 534 GB that they train with, but it has 600 GB; give --no-async-save, which writes while training waits"
        ]
    )
    assert warned(replace(host, settings=settings_of("qwen3-8b", async_save=False))) == []


@contextmanager
def refused(message: str) -> Iterator[None]:
    with pytest.raises(UsageError) as error:
        yield
    assert without_sizes(str(error.value)) == message


def test_settings_that_the_plan_was_not_priced_for_are_refused() -> None:
    with refused(
        snapshot(
            "plan.parquet was priced for ZeRO-3, bf16, selective recomputation, chunked loss, not for --recompute none, which needs X of 80.0 GB for 16,384 tokens a rank; remove it, or plan with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 16384 --sync microbatch --global-batch-size 8 --no-shuffle --solver test --zero 3 --precision bf16 --recompute none --model qwen3-8b --cluster example-8x8 -o plan-2.parquet"
        )
    ):
        check_recipe_of_plan(on_gpus(), settings_of("qwen3-8b", recompute="none"))
    with refused(
        snapshot(
            "plan.parquet was priced for ZeRO-3, bf16, selective recomputation, chunked loss, not for --zero 2, --precision amp, which needs X of 80.0 GB for 16,384 tokens a rank; remove them, or plan with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 16384 --sync microbatch --global-batch-size 8 --no-shuffle --solver test --zero 2 --precision amp --recompute selective --model qwen3-8b --cluster example-8x8 -o plan-2.parquet"
        )
    ):
        check_recipe_of_plan(on_gpus(), settings_of("qwen3-8b", zero="2", precision="amp"))


@pytest.mark.parametrize(
    ("planned", "asked", "message"),
    [
        (
            {},
            {"lora": "r=8"},
            snapshot(
                "plan.parquet was priced for ZeRO-3, bf16, selective recomputation, chunked loss, not for --lora r=8, which needs X of 80.0 GB for 16,384 tokens a rank; remove it, or plan with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 16384 --sync microbatch --global-batch-size 8 --no-shuffle --solver test --zero 3 --precision bf16 --recompute selective --lora r=8 --model qwen3-8b --cluster example-8x8 -o plan-2.parquet"
            ),
        ),
        (
            {"lora": "r=8"},
            {"lora": "r=16"},
            snapshot(
                "plan.parquet was priced for ZeRO-3, bf16, selective recomputation, chunked loss, LoRA r=8, not for --lora r=16, which needs X of 80.0 GB for 16,384 tokens a rank; remove it, or plan with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 16384 --sync microbatch --global-batch-size 8 --no-shuffle --solver test --zero 3 --precision bf16 --recompute selective --lora r=16 --model qwen3-8b --cluster example-8x8 -o plan-2.parquet"
            ),
        ),
        (
            {"lora": "r=8"},
            {"freeze": "layers.[0-3].*"},
            snapshot(
                "plan.parquet was priced for ZeRO-3, bf16, selective recomputation, chunked loss, LoRA r=8, not for --freeze 'layers.[0-3].*', which needs X of 80.0 GB for 16,384 tokens a rank; remove it, or plan with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 16384 --sync microbatch --global-batch-size 8 --no-shuffle --solver test --zero 3 --precision bf16 --recompute selective --freeze 'layers.[0-3].*' --model qwen3-8b --cluster example-8x8 -o plan-2.parquet"
            ),
        ),
    ],
    ids=["adapters", "other adapters", "patterns"],
)
def test_what_the_plan_was_not_priced_to_train_is_refused(
    planned: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    with refused(message):
        check_recipe_of_plan(on_gpus(recipe=replace(PLANNED, **planned)), settings_of("qwen3-8b", **asked))


def test_what_the_plan_was_not_priced_to_train_is_refused_on_cpus_too() -> None:
    rehearsal = on_cpu("qwen3-tiny", 32 * 10**9, metadata=plan_metadata(num_ranks=4, sync="microbatch", recipe=PLANNED))
    check_recipe_of_plan(rehearsal, settings_of("qwen3-tiny", zero="0", precision="fp32"))
    with pytest.raises(
        UsageError, match=r"chunked loss, not for --lora r=8; remove it, or .* --precision bf16 .* --lora r=8 "
    ):
        check_recipe_of_plan(rehearsal, settings_of("qwen3-tiny", lora="r=8"))


def test_a_run_goes_on_to_train_what_it_did() -> None:
    with refused(
        snapshot(
            "run was planned for ZeRO-3, bf16, selective recomputation, chunked loss, and the trained weights cannot change within a run; remove --lora"
        )
    ):
        check_recipe_of_plan(on_gpus(), settings_of("qwen3-8b", lora="r=8", resume=True))


def test_what_the_plan_was_priced_to_train_is_trained_on_whatever_device() -> None:
    tuned = replace(PLANNED, lora="r=8", freeze_vision=True)
    check_recipe_of_plan(on_gpus(recipe=tuned), settings_of("qwen3-8b"))
    for device in ("cuda", "cpu"):
        found = settings_of("qwen3-8b").recipe(tuned, sync="microbatch", device=device)
        assert (found.lora, found.freeze_vision) == ("r=8", True)
    assert settings_of("qwen3-8b", freeze="norm.*").recipe(tuned, sync="microbatch", device="cuda").lora is None


def test_settings_that_say_what_the_plan_says_are_not() -> None:
    check_recipe_of_plan(on_gpus(), settings_of("qwen3-8b"))
    check_recipe_of_plan(on_gpus(), settings_of("qwen3-8b", recompute="selective", zero="3"))
    check_recipe_of_plan(on_gpus(recipe=None), settings_of("qwen3-8b", recompute="none"))


def test_a_plan_for_accelerators_may_be_tried_on_a_cpu_under_any_settings() -> None:
    tried = on_cpu("qwen3-tiny", 64 << 30, metadata=plan_metadata(sync="microbatch", num_ranks=4, recipe=PLANNED))
    settings = settings_of("qwen3-tiny", recompute="full")
    check_recipe_of_plan(tried, settings)
    assert settings.recipe(PLANNED, sync="microbatch", device="cpu") == Recipe(
        zero_stage=3, precision="fp32", recompute="full"
    )
    of_cpus = replace(tried, metadata=replace(tried.metadata, recipe=Recipe(zero_stage=3, precision="fp32")))
    with pytest.raises(Exception, match="not for --recompute full"):
        check_recipe_of_plan(of_cpus, settings)


def test_a_plan_without_any_option_and_the_launch_of_its_model_are_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Accelerators(kind="cuda", name="NVIDIA H100 80GB HBM3", count=8, memory_bytes=80 * 10**9)
    monkeypatch.setattr(problem_settings, "find_accelerators", lambda: found)
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"length": [10, 20, 30]}), "dataset.parquet")
    problem = resolve(PlanRequest(manifest=Path("dataset.parquet")), Assumptions()).problem
    metadata = plan_metadata(
        num_ranks=problem.num_ranks,
        sync=problem.sync,
        tokens_per_rank=problem.tokens_per_rank,
        recipe=problem.recipe,
        cost_profile=problem.profile.text,
    )
    settings = settings_of("qwen3vl-8b")
    launched = job("cuda", machine=H100S, metadata=metadata, settings=settings, model="qwen3vl-8b", num_nodes=1)
    check_recipe_of_plan(launched, settings)
    assert findings(launched) == []
    assert list(profile_model(launched, Facts())) == []
    need = job_memory(launched, Facts())
    assert need is not None and 0.9 * 0.92 * 80e9 < need.total_bytes <= 0.92 * 80e9
    assert settings.recipe(metadata.recipe, sync=metadata.sync, device="cuda") == problem.recipe


def test_what_a_script_holds_on_a_host_is_only_known_by_the_model_that_is_named() -> None:
    script = replace(on_gpus(), settings=None, model=None, program=("train.py",), machine=local_job().machine)
    assert job_memory(script, Facts()) is None
    assert job_memory(replace(script, model="qwen3-8b"), Facts()) is not None


def test_what_exceeds_a_host_is_told_in_times_of_it() -> None:
    need = job_memory(on_gpus(), Facts())
    assert need is not None
    shares = list(memory_table(replace(need, capacity_bytes=need.total_bytes / 8)).columns[2].cells)
    assert shares[-2] == "8.0x"


def test_the_fullest_micro_batch_of_the_plan_is_shown_and_is_what_must_fit(tmp_path: Path) -> None:
    """As needed, one that recomputes nothing may need more than a longer one that does."""
    levels = (
        RecomputeLevel(recompute="none", tokens=4000),
        RecomputeLevel(recompute="selective", tokens=60_000, seconds_per_token=1e-5),
    )
    recipe = Recipe(zero_stage=3, recompute="as-needed")
    rows = [Row((0,), (4000,), 0), Row((1,), (900, 100), 0)], [Row((0, 1), (9001,), 0)]
    plan = write_plan(
        tmp_path / "plan.parquet",
        rows,
        num_ranks=8,
        sync="microbatch",
        recipe=recipe,
        cost_profile=levels_profile(*levels),
    )
    planned = replace(
        on_gpus(), metadata=replace(PlanReader(plan).metadata, tokens_per_rank=5_000_000), plan=plan, num_nodes=1
    )
    need = job_memory(planned, Facts())
    assert need is not None and need.plan_tokens == 4501
    place, spec = need.place, load_model("qwen3-8b")

    def alike(kind: LayerRecompute, tokens: int) -> float:
        return place.memory(spec, replace(recipe, recompute=kind), "microbatch").total_bytes(tokens)

    assert need.plan_bytes == alike("none", 4000)
    assert alike("selective", 4501) < need.plan_bytes < alike("none", 4501)
    last, tracked = (list(column.cells)[-2] for column in memory_table(need).columns[:2])
    assert (last, tracked) == ("at most in this plan, of up to 4,501 tokens", f"{need.plan_bytes / 1e9:.2f}")
    assert need.document()["plan_tokens"] == 4501
    assert need.plan_bytes < need.capacity_bytes < need.total_bytes and findings(planned) == []
    assert findings(replace(planned, machine=replace(H100S, device_memory_bytes=int(need.plan_bytes) - 1)))
