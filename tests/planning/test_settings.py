"""What is assumed where nothing was said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.profile import CostProfile, dump_cost_profile, parse_cost_profile
from fcp_cli.cost.recipe import Recipe, RecipeRequest
from fcp_cli.errors import OverlongError
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.models.cluster import DEFAULT_MODEL
from fcp_cli.models.model import load_model
from fcp_cli.plan.setup import Pipeline
from fcp_cli.planning import settings
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.pipelines import pipeline_of
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings import resolve, with_counted_model
from fcp_cli.util.console import Assumptions
from fcp_cli.util.machine import Accelerators
from tests.messages import raises
from tests.planning.examples import PROFILE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "find_accelerators", lambda: None)
    pq.write_table(pa.table({"length": [10, 20, 30]}), tmp_path / "dataset.parquet")
    return tmp_path


DATASET = Path("dataset.parquet")
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


ROOM_FOR_2000 = "memory: {bytes_per_token: 1000, model_state_bytes: 500000, capacity_bytes: 2500000}\n"


def problem_for(assumptions: Assumptions | None = None, **asked: Any) -> Problem:
    return resolve(PlanRequest(manifest=DATASET, **asked), assumptions or Assumptions()).problem


def test_without_a_profile_one_is_computed_for_the_example_cluster_where_there_is_no_accelerator() -> None:
    assumptions = Assumptions()
    inputs = resolve(PlanRequest(manifest=DATASET), assumptions)
    problem = inputs.problem
    assert (problem.num_ranks, problem.ranks_per_node) == (64, 8)
    assert (problem.profile.model, problem.profile.cluster) == (DEFAULT_MODEL, "example-8x8")
    assert parse_cost_profile(problem.profile.text, name="it").recipe == problem.recipe is not None
    chosen = ("recipe", "--tokens-per-rank")
    assert {name: text for name, text in assumptions.assumed.items() if name not in chosen} == snapshot(
        {
            "--model": "qwen3-vl-8b (and what 'fcp launch' trains under the plan; name yours)",
            "--cluster": "example-8x8 (no accelerator here; name yours, or this-machine for CPU cores)",
            "--ranks": "64 (the cluster example-8x8, one device per rank)",
            "--ranks-per-node": "8 (the cluster example-8x8)",
            "--sync": "microbatch (chosen with the recipe)",
            "--profile": "qwen3-vl-8b on example-8x8 (estimated from data sheets; run 'fcp profile' to measure)",
            "--global-batch-size": "3 (all sequences)",
        }
    )
    assert re.search(r"\(the quickest of \d+ that fit; the second, .*\)$", assumptions.assumed["recipe"])
    assert re.fullmatch(
        r"\d+ \(the model takes [\d.]+ of 58.9 GB on each of 64 ranks, and a token [\d.]+ MB\)",
        assumptions.assumed["--tokens-per-rank"],
    )


def test_accelerators_of_this_machine_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Accelerators(kind="cuda", name="NVIDIA H100 80GB HBM3", count=8, memory_bytes=85 * 10**9)
    monkeypatch.setattr(settings, "find_accelerators", lambda: found)
    assumptions = Assumptions()
    problem = problem_for(assumptions)
    assert (problem.num_ranks, problem.ranks_per_node, problem.profile.cluster) == (8, 8, "h100-8x8")
    assert problem.profile.memory.capacity_bytes == pytest.approx(0.92 * 85e9)
    assert assumptions.assumed["--cluster"] == snapshot(
        "8 x NVIDIA H100 80GB HBM3, 85 GB each (found on this machine; rates of h100-8x8)"
    )
    assert assumptions.assumed["--ranks"] == snapshot("8 (the cluster h100-8x8, one device per rank)")


def test_what_was_asked_for_of_the_recipe_is_kept() -> None:
    asked = RecipeRequest(zero="3", recompute="full")
    problem = problem_for(model="qwen3-8b", cluster="h200", recipe=asked, ranks=8)
    assert (problem.recipe, problem.sync) == (Recipe(zero_stage=3, recompute="full"), "microbatch")


def test_what_offloading_costs_is_said() -> None:
    asked = RecipeRequest(offload="activations", recompute="full")
    assumptions = Assumptions()
    request = PlanRequest(
        manifest=DATASET, model="qwen3-8b", cluster="h100", recipe=asked, ranks=8, tokens_per_rank=65_536
    )
    resolve(request, assumptions)
    assert assumptions.assumed["offloading"] == snapshot(
        "38.1 GB for a micro-batch of 65,536 tokens (0 ms longer at 25 GB/s each way; smaller ones that fit stay on the device)"
    )
    resolve(replace(request, recipe=RecipeRequest(recompute="full")), assumptions := Assumptions())
    assert "offloading" not in assumptions.assumed


def test_a_budget_that_was_given_is_planned_with_even_without_room_for_it() -> None:
    assumptions = Assumptions()
    request = PlanRequest(manifest=DATASET, model="qwen3-8b", cluster="h100", ranks=1, tokens_per_rank=2048)
    assert resolve(request, assumptions).problem.tokens_per_rank == 2048
    assert assumptions.warnings[0].startswith("--tokens-per-rank is 2,048, but a rank holds 0: the model takes ")


def profile_of(folder: Path, **changed: object) -> CostProfile:
    """A computed profile of Qwen3-8B on 64 ranks, in this folder."""
    request = PlanRequest(manifest=DATASET, model="qwen3-8b", cluster="h100", recipe=RecipeRequest(recompute="full"))
    profile = replace(resolve(request, Assumptions()).problem.profile, **changed)  # type: ignore[arg-type]
    (folder / "profile.yaml").write_text(dump_cost_profile(profile))
    return profile


def test_a_profile_of_64_ranks_is_budgeted_anew_for_8(folder: Path) -> None:
    made_for_64 = profile_of(folder)
    assumptions = Assumptions()
    problem = problem_for(assumptions, ranks=8)
    assert problem.recipe is not None and problem.recipe.recompute == "full"
    place = JobRanks(num_ranks=8, ranks_per_node=8, capacity_bytes=made_for_64.memory.capacity_bytes)
    fit = place.fit(load_model("qwen3-8b"), problem.recipe, problem.sync)
    assert problem.tokens_per_rank == fit.tokens != made_for_64.memory.tokens_per_rank()
    assert "on each of 8 ranks" in assumptions.assumed["--tokens-per-rank"]
    assert "the cost profile's" in assumptions.assumed["recipe"]


def test_the_budget_counts_copies_of_keys_that_ranks_may_hold(folder: Path) -> None:
    """64 ranks split 32 heads, 8 of keys and values, into copies; the 8 of a node do not, but have more peers."""

    def tokens(attention: Any) -> int:
        return problem_for(attention=attention).tokens_per_rank

    computed = profile_of(folder)
    computed_tokens = [tokens("ring"), tokens("2d"), tokens("auto"), tokens("ulysses")]
    assert computed_tokens[1] == computed_tokens[2]
    assert 0.9 < computed_tokens[1] / computed_tokens[0] < 1.0
    assert 0.8 < computed_tokens[3] / computed_tokens[1] < 1.0
    readings = [{"tokens": count, "peak_bytes": 1.0} for count in (1024, 2048)]
    profile_of(folder, origin="measured", measurement={"memory_readings": readings})
    assert tokens("ulysses") < tokens("2d") < tokens("ring")
    profile_of(folder, recipe=None)  # which says nothing of what is kept
    assert tokens("ulysses") < tokens("2d") == tokens("ring") == computed.memory.tokens_per_rank()


def test_a_plan_of_several_nodes_warns_of_messages_that_were_measured_on_one(folder: Path) -> None:
    link = {"seconds_per_message": 1e-5, "bytes_per_second": 3e11}
    cases = (
        ("cuda", ("intra_node",), 64, 1),
        ("cuda", ("intra_node",), 8, 0),
        ("cuda", ("intra_node", "inter_node"), 64, 0),
        ("cuda", (), 64, 0),
        ("cpu", ("intra_node",), 64, 0),
    )
    for device, tiers, ranks, warnings in cases:
        transfers = dict.fromkeys(tiers, link)
        profile_of(folder, origin="measured", measurement={"device": device, "transfers": transfers})
        assumptions = Assumptions()
        problem_for(assumptions, ranks=ranks)
        found = [warning for warning in assumptions.warnings if "'fcp profile --nodes 2'" in warning]
        assert len(found) == warnings, (device, tiers, ranks)


def test_bytes_of_a_token_that_were_measured_stay(folder: Path) -> None:
    computed = profile_of(folder)
    readings = [{"tokens": tokens, "peak_bytes": 1.0} for tokens in (1024, 2048)]
    profile_of(
        folder,
        origin="measured",
        memory=replace(computed.memory, bytes_per_token=1e6),
        measurement={"memory_readings": readings},
    )
    assumptions = Assumptions()
    problem = problem_for(assumptions)
    assert problem.recipe is not None
    place = JobRanks(num_ranks=64, ranks_per_node=8, capacity_bytes=computed.memory.capacity_bytes)
    state = place.memory(load_model("qwen3-8b"), problem.recipe, problem.sync).binding(place.capacity_bytes).fixed_bytes
    assert problem.tokens_per_rank == int((place.capacity_bytes - state) / 1e6)
    assert assumptions.assumed["--tokens-per-rank"].endswith("and a token 1.00 MB, measured)")


def test_times_of_another_recipe_are_refused(folder: Path) -> None:
    profile_of(folder)
    with raises(
        "UsageError: the cost profile of qwen3-8b on h100-8x8 has times of ZeRO-3, bf16, full recomputation, chunked loss; make another with: fcp profile --analytic --cluster h100-8x8 --model qwen3-8b --recompute none -o profile-2.yaml"
    ):
        problem_for(recipe=RecipeRequest(recompute="none"))


def test_a_profile_that_knows_no_recipe_gives_plans_without_one(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    problem = problem_for()
    assert (problem.recipe, problem.sync) == (None, "iteration")


def test_another_model_than_the_profile_is_of_has_its_own_computed(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    assumptions = Assumptions()
    assert problem_for(assumptions, model="llama3-8b").profile.model == "llama3-8b"
    assert problem_for(model="qwen3-8b").recipe is None


def test_the_profile_of_the_folder_comes_before_the_shipped_one(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE.replace("qwen3-8b", "mine"))
    assumptions = Assumptions()
    assert problem_for(assumptions).profile.model == "mine"
    assert assumptions.assumed["--profile"].startswith("profile.yaml (found here")


@pytest.mark.parametrize("origin", ["analytic", "measured"])
def test_a_computed_profile_that_lies_here_gives_way_to_a_named_model_and_cluster(folder: Path, origin: str) -> None:
    """Its recipe was chosen without lengths."""
    (folder / "profile.yaml").write_text(re.sub("origin: .*", f"origin: {origin}", PROFILE))
    cluster = parse_cost_profile(PROFILE, name="profile.yaml").cluster
    found = problem_for(model="qwen3-8b", cluster=cluster)
    assert (found.recipe is None) == (origin == "measured")


def test_what_is_said_is_not_assumed(folder: Path) -> None:
    (folder / "other.yaml").write_text(PROFILE)
    assumptions = Assumptions()
    request = PlanRequest(
        manifest=DATASET,
        profile=Path("other.yaml"),
        ranks=3,
        ranks_per_node=2,
        tokens_per_rank=100,
        global_batch_size=2,
    )
    inputs = resolve(request, assumptions)
    assert assumptions.assumed == {}
    assert (inputs.problem.num_ranks, inputs.problem.ranks_per_node) == (3, 2)
    assert inputs.problem.tokens_per_rank == 100
    assert inputs.settings.global_batch_size == 2


def test_a_node_has_no_more_ranks_than_the_job() -> None:
    assert problem_for(ranks=4).ranks_per_node == 4


def test_memory_figures_give_the_token_budget(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE + ROOM_FOR_2000)
    assumptions = Assumptions()
    assert problem_for(assumptions).tokens_per_rank == 2000
    assert "the profile's memory" in assumptions.assumed["--tokens-per-rank"]


def test_a_budget_over_the_profiles_memory_is_said(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE + ROOM_FOR_2000)
    assumptions = Assumptions()
    inputs = resolve(PlanRequest(manifest=DATASET, tokens_per_rank=2001), assumptions)
    assert inputs.problem.tokens_per_rank == 2001
    assert assumptions.warnings == snapshot(
        ["--tokens-per-rank is 2,001, but by the profile's memory a rank holds 2,000"]
    )
    assert "--tokens-per-rank" not in assumptions.assumed
    assumptions = Assumptions()
    resolve(PlanRequest(manifest=DATASET, tokens_per_rank=2000), assumptions)
    assert assumptions.warnings == []


def test_without_memory_figures_the_budget_is_assumed(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    assert problem_for().tokens_per_rank == 16384


def of_devices(tensor_parallel: int, pipeline_parallel: int) -> str:
    cut = f"tensor_parallel: {tensor_parallel}, pipeline_parallel: {pipeline_parallel}"
    return f"{PROFILE}\nmeasurement: {{{cut}}}\n"


# The text of the profile in the folder, if there is one, and what is asked for.
REFUSALS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "a model without room under ZeRO-0": (
        None,
        {"model": "qwen3-8b", "cluster": "h100", "ranks": 8, "recipe": RecipeRequest(zero="0")},
    ),
    "a model without room on one rank": (None, {"model": "qwen3-8b", "cluster": "h100", "ranks": 1}),
    "a model without room in tensors cut in two": (
        None,
        {"model": "llama3-70b", "cluster": "h100", "tensor_parallel": 2},
    ),
    "a profile's memory without room": (PROFILE + ROOM_FOR_2000.replace("500000,", "2500000,"), {}),
    "a cluster that nobody knows": (PROFILE.replace("example-8x8", "elsewhere"), {}),
    "another model than the profile's": (PROFILE, {"model": "llama3-8b", "profile": Path("profile.yaml")}),
    "fewer tokens than a sequence is padded to": (
        PROFILE,
        {"padded_rings": True, "tensor_parallel": 2, "tokens_per_rank": 3},
    ),
    "a profile of other devices": (of_devices(2, 1), {"tensor_parallel": 4}),
    "virtual stages under sync iteration": (of_devices(1, 2), {"virtual_stages": 2, "sync": "iteration"}),
    "more blocks of layers than layers": (of_devices(1, 2), {"virtual_stages": 20}),
    "virtual stages without a pipeline": (of_devices(2, 1), {"virtual_stages": 2}),
}
REFUSED_WITH = snapshot(
    {
        "a model without room under ZeRO-0": "UsageError: qwen3-8b needs 153.0 of the 73.6 GB that each of 8 ranks may use, under ZeRO-0, bf16, full recomputation, chunked loss, offloaded activations, sync iteration; --zero 3 --precision bf16 --recompute selective --sync microbatch leave room for 36,187 tokens",
        "a model without room on one rank": "UsageError: qwen3-8b needs 138.5 of the 73.6 GB that each of 1 ranks may use, under ZeRO-3, bf16, full recomputation, chunked loss, offloaded activations, sync microbatch; plan for more --ranks, a smaller --model, or cut it with --tensor-parallel",
        "a model without room in tensors cut in two": "UsageError: llama3-70b needs 229.7 of the 73.6 GB that each of 32 ranks may use, under ZeRO-1, bf16, full recomputation, plain loss, offloaded activations, sync iteration; --zero 3 --precision bf16 --recompute full --loss plain --sync microbatch leave room for 32,232 tokens under Megatron-FSDP",
        "a profile's memory without room": "UsageError: the profile's memory leaves no room for tokens; give --tokens-per-rank",
        "a cluster that nobody knows": "UsageError: the profile's cluster 'elsewhere' is not known here; give --ranks",
        "another model than the profile's": "UsageError: profile.yaml is of qwen3-8b on example-8x8; drop --model and --cluster to use it, or --profile to have one computed",
        "fewer tokens than a sequence is padded to": "UsageError: a rank may hold 3 tokens, but sequences are padded to 4 on it",
        "a profile of other devices": "UsageError: the plan is for tensor parallel 4 and pipeline parallel 1, but the cost profile of qwen3-8b on example-8x8 is for tensor parallel 2 and pipeline parallel 1; make one with: fcp profile --analytic --model qwen3-8b --cluster example-8x8 --tensor-parallel 4 --pipeline-parallel 1 -o profile-2.yaml",
        "virtual stages under sync iteration": "UsageError: --virtual-stages is 2, whose ranks must run equally many micro-batches; add --sync microbatch",
        "more blocks of layers than layers": "UsageError: 2 stages of 20 blocks of layers each exceed the 36 layers of qwen3-8b; give fewer --virtual-stages",
        "virtual stages without a pipeline": "UsageError: --virtual-stages is 2, but there is no pipeline: --pipeline-parallel is 1",
    }
)


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_planned_for_is_refused_with_what_helps(folder: Path, case: str) -> None:
    profile, asked = REFUSALS[case]
    if profile is not None:
        (folder / "profile.yaml").write_text(profile)
    with raises(REFUSED_WITH[case]):
        problem_for(**asked)


def test_what_a_rank_is_made_of_comes_from_the_profile_and_divides_the_cluster(folder: Path) -> None:
    (folder / "profile.yaml").write_text(of_devices(2, 2))
    assumptions = Assumptions()
    problem = problem_for(assumptions, sync="microbatch")
    assert (problem.tensor_parallel, problem.pipeline_parallel) == (2, 2)
    assert (problem.num_ranks, problem.ranks_per_node) == (16, 4)  # of 64 devices; a stage has 4 of them on a node
    assert assumptions.assumed["--tensor-parallel"] == "2 (the cost profile)"
    assert assumptions.assumed["--ranks"] == "16 (the cluster example-8x8, 4 devices per rank)"


def test_padded_rings_round_the_budget_to_what_sequences_are_padded_to(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    assumptions = Assumptions()
    problem = problem_for(assumptions, padded_rings=True, tensor_parallel=2, tokens_per_rank=1003)
    assert (problem.padding_multiple, problem.tokens_per_rank) == (4, 1000)
    assert "of 1003, since sequences are padded to multiples of 4" in assumptions.assumed["--tokens-per-rank"]


def test_a_profile_that_does_not_say_what_its_ranks_are_made_of_is_told(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    assumptions = Assumptions()
    problem = problem_for(assumptions, ranks=4, tensor_parallel=2)
    assert (problem.num_ranks, problem.tensor_parallel, problem.pipeline_parallel) == (4, 2, 1)
    assert "the cost profile does not say" in assumptions.assumed["devices of a rank"]


def test_virtual_stages_ask_for_waves_and_a_pipeline_does_not(folder: Path) -> None:
    (folder / "profile.yaml").write_text(of_devices(1, 2))
    plain = problem_for()
    assert plain.sync == "iteration" and plain.pipeline is not None and plain.pipeline.virtual_stages == 1
    interleaved = problem_for(virtual_stages=2)
    assert interleaved.sync == "microbatch" and interleaved.pipeline is not None


def test_a_pipeline_takes_its_shares_from_model_recipe_and_cluster() -> None:
    profile, ranks = (
        parse_cost_profile(PROFILE, name="it"),
        JobRanks(num_ranks=8, ranks_per_node=8, pipeline_parallel=2),
    )
    whole, again = (pipeline_of(profile, ranks, Recipe(recompute=recompute)) for recompute in ("none", "full"))
    assert whole is not None and again is not None
    assert (whole.forward_share, again.forward_share) == (1 / 3, 1 / 4)
    assert whole.head_share == pytest.approx(0.082, abs=1e-3)  # of Qwen3-8B's matrices
    assert whole.send_seconds_per_token == pytest.approx(2 * 4096 / profile.bandwidth.inter_node)
    unknown = pipeline_of(replace(profile, model="mine"), ranks, None)
    assert unknown == Pipeline(forward_share=1 / 3)


def test_images_under_a_profile_without_an_encoder_are_warned_of(folder: Path) -> None:
    pq.write_table(pa.table({"length": [4096] * 8, "vision_patches": [1024] * 8}), "lengths.parquet")
    for model, warned in (("qwen3-8b", True), ("qwen3-vl-8b", False)):
        assumptions = Assumptions()
        resolve(PlanRequest(manifest=Path("lengths.parquet"), model=model, cluster="h100-8x8"), assumptions)
        assert any("has no vision encoder" in warning for warning in assumptions.warnings) is warned


def test_a_sequence_beyond_a_given_token_budget_is_answered_with_one_that_holds_it() -> None:
    request = PlanRequest(manifest=DATASET, model="qwen3-8b", cluster="h200-8x8", ranks=2, ranks_per_node=2)
    refused = resolve(replace(request, tokens_per_rank=10), Assumptions())
    with pytest.raises(OverlongError) as error:
        refused.batches()
    assert "or --tokens-per-rank 15 to hold them, or more devices: --ranks 4" in str(error.value)
    resolve(replace(request, tokens_per_rank=15), Assumptions()).batches()


def test_a_global_batch_of_more_sequences_than_there_are_is_said() -> None:
    assumptions = Assumptions()
    resolve(PlanRequest(manifest=DATASET, global_batch_size=500), assumptions)
    assert assumptions.assumed["sequences of a step"] == "3 (the manifest has no more, but --global-batch-size is 500)"
    assumptions = Assumptions()
    resolve(PlanRequest(manifest=DATASET, global_batch_size=3), assumptions)
    assert "sequences of a step" not in assumptions.assumed


def counted_by(checkpoint: Path, manifest: Path) -> None:
    header = {"source": {"kind": "chat", "path": "x", "tokenizer": str(checkpoint), "train_on": "assistant"}}
    table = pa.table({"length": [10, 20]}).replace_schema_metadata({"fcp": json.dumps(header)})
    pq.write_table(table, manifest)


def test_the_checkpoint_by_which_a_manifest_was_counted_is_the_model_that_is_planned_for(folder: Path) -> None:
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text(json.dumps(QWEN3))
    counted_by(folder / "checkpoint", DATASET)
    assumptions = Assumptions()
    assert with_counted_model(PlanRequest(manifest=DATASET), assumptions).model == str(folder / "checkpoint")
    assert assumptions.assumed == {
        "--model": f"{folder / 'checkpoint'} (the checkpoint by which dataset.parquet was counted)"
    }
    assert with_counted_model(PlanRequest(manifest=DATASET, model="qwen3-8b"), assumptions).model == "qwen3-8b"
    (folder / "profile.yaml").touch()
    assert with_counted_model(PlanRequest(manifest=DATASET), assumptions).model is None


def test_a_folder_of_a_tokenizer_alone_names_no_model(folder: Path) -> None:
    (folder / "tokenizer").mkdir()
    counted_by(folder / "tokenizer", DATASET)
    assert with_counted_model(PlanRequest(manifest=DATASET), Assumptions()).model is None
