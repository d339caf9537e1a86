"""What is assumed where nothing was said."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.console import Origins
from fcp_cli.errors import UsageError
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import resolve
from tests.messages import raises
from tests.planning.examples import PROFILE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"length": [10, 20, 30]}), tmp_path / "dataset.parquet")
    return tmp_path


DATASET = Path("dataset.parquet")


def test_a_shipped_profile_and_its_cluster_stand_in() -> None:
    origins = Origins()
    inputs = resolve(PlanRequest(manifest=DATASET), origins)
    assert (inputs.problem.num_ranks, inputs.problem.ranks_per_node) == (64, 8)
    assert inputs.problem.profile.model == "qwen3-8b"
    assert set(origins.assumed) == {
        "--profile",
        "--ranks",
        "--ranks-per-node",
        "--tokens-per-rank",
        "--global-batch-size",
    }


def test_the_profile_of_the_folder_comes_before_the_shipped_one(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE.replace("qwen3-8b", "mine"))
    origins = Origins()
    assert resolve(PlanRequest(manifest=DATASET), origins).problem.profile.model == "mine"
    assert origins.assumed["--profile"].startswith("profile.yaml (found here")


def test_what_is_said_is_not_assumed(folder: Path) -> None:
    (folder / "other.yaml").write_text(PROFILE)
    origins = Origins()
    request = PlanRequest(
        manifest=DATASET,
        profile=Path("other.yaml"),
        ranks=3,
        ranks_per_node=2,
        tokens_per_rank=100,
        global_batch_size=2,
        headroom=0.25,
    )
    inputs = resolve(request, origins)
    assert origins.assumed == {}
    assert (inputs.problem.num_ranks, inputs.problem.ranks_per_node) == (3, 2)
    assert inputs.problem.tokens_per_rank == 75
    assert inputs.settings.global_batch_size == 2


def test_a_node_has_no_more_ranks_than_the_job() -> None:
    assert resolve(PlanRequest(manifest=DATASET, ranks=4), Origins()).problem.ranks_per_node == 4


def test_memory_figures_give_the_token_budget(folder: Path) -> None:
    (folder / "profile.yaml").write_text(
        PROFILE + "memory: {bytes_per_token: 1000, model_state_bytes: 500000, capacity_bytes: 2500000}\n"
    )
    origins = Origins()
    assert resolve(PlanRequest(manifest=DATASET), origins).problem.tokens_per_rank == 2000
    assert "the profile's memory" in origins.assumed["--tokens-per-rank"]


def test_a_budget_over_the_profiles_memory_is_said(folder: Path) -> None:
    (folder / "profile.yaml").write_text(
        PROFILE + "memory: {bytes_per_token: 1000, model_state_bytes: 500000, capacity_bytes: 2500000}\n"
    )
    origins = Origins()
    inputs = resolve(PlanRequest(manifest=DATASET, tokens_per_rank=2001), origins)
    assert inputs.problem.tokens_per_rank == 2001
    assert origins.warnings == snapshot(["--tokens-per-rank is 2,001, but by the profile's memory a rank holds 2,000"])
    assert "--tokens-per-rank" not in origins.assumed
    origins = Origins()
    resolve(PlanRequest(manifest=DATASET, tokens_per_rank=2000), origins)
    assert origins.warnings == []


def test_without_memory_figures_the_budget_is_assumed(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    assert resolve(PlanRequest(manifest=DATASET), Origins()).problem.tokens_per_rank == 16384


def test_memory_without_room_is_refused(folder: Path) -> None:
    (folder / "profile.yaml").write_text(
        PROFILE + "memory: {bytes_per_token: 1000, model_state_bytes: 9000, capacity_bytes: 9000}\n"
    )
    with raises(snapshot("UsageError: the profile's memory leaves no room for tokens; give --tokens-per-rank")):
        resolve(PlanRequest(manifest=DATASET), Origins())


def test_an_unknown_cluster_needs_the_number_of_ranks(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE.replace("example-8x8", "elsewhere"))
    with raises(snapshot("UsageError: the profile's cluster 'elsewhere' is not known here; give --ranks")):
        resolve(PlanRequest(manifest=DATASET), Origins())


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_headroom_is_a_fraction(headroom: float) -> None:
    with pytest.raises(UsageError, match=r"--headroom is .* it must be a fraction"):
        resolve(PlanRequest(manifest=DATASET, headroom=headroom), Origins())


def of_devices(folder: Path, tensor_parallel: int, pipeline_parallel: int) -> Path:
    path = folder / "cut.yaml"
    cut = f"tensor_parallel: {tensor_parallel}, pipeline_parallel: {pipeline_parallel}"
    path.write_text(f"{PROFILE}\nmeasurement: {{{cut}}}\n")
    return path


def test_what_a_rank_is_made_of_comes_from_the_profile_and_divides_the_cluster(folder: Path) -> None:
    origins = Origins()
    request = PlanRequest(manifest=DATASET, profile=of_devices(folder, 2, 2), sync="microbatch")
    problem = resolve(request, origins).problem
    assert (problem.tensor_parallel, problem.pipeline_parallel) == (2, 2)
    assert (problem.num_ranks, problem.ranks_per_node) == (16, 4)  # of 64 devices; a stage has 4 of them on a node
    assert origins.assumed["--tensor-parallel"] == "2 (the cost profile)"
    assert origins.assumed["--ranks"] == "16 (the cluster example-8x8, 4 devices per rank)"


def test_padded_rings_round_the_budget_to_what_sequences_are_padded_to(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    origins = Origins()
    request = PlanRequest(manifest=DATASET, padded_rings=True, tensor_parallel=2, tokens_per_rank=1003)
    problem = resolve(request, origins).problem
    assert (problem.padding_multiple, problem.tokens_per_rank) == (4, 1000)
    assert "of 1003, since sequences are padded to multiples of 4" in origins.assumed["--tokens-per-rank"]
    with raises(snapshot("UsageError: a rank may hold 3 tokens, but sequences are padded to 4 on it")):
        resolve(PlanRequest(manifest=DATASET, padded_rings=True, tensor_parallel=2, tokens_per_rank=3), Origins())


def test_a_profile_that_does_not_say_what_its_ranks_are_made_of_is_told(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    origins = Origins()
    problem = resolve(PlanRequest(manifest=DATASET, ranks=4, tensor_parallel=2), origins).problem
    assert (problem.num_ranks, problem.tensor_parallel, problem.pipeline_parallel) == (4, 2, 1)
    assert "the cost profile does not say" in origins.assumed["devices of a rank"]


def test_a_profile_of_other_devices_is_refused_with_the_command_that_makes_the_right_one(folder: Path) -> None:
    with pytest.raises(UsageError) as error:
        resolve(PlanRequest(manifest=DATASET, profile=of_devices(folder, 2, 1), tensor_parallel=4), Origins())
    assert str(error.value) == snapshot(
        "the plan is for tensor parallel 4 and pipeline parallel 1, but the cost profile of qwen3-8b on example-8x8 is "
        "for tensor parallel 2 and pipeline parallel 1; make one with: fcp profile --analytic --model qwen3-8b "
        "--cluster example-8x8 --tensor-parallel 4 --pipeline-parallel 1 -o profile.yaml"
    )


def test_a_pipeline_asks_for_waves(folder: Path) -> None:
    with pytest.raises(UsageError, match="equally many micro-batches; add --sync microbatch"):
        resolve(PlanRequest(manifest=DATASET, profile=of_devices(folder, 1, 2)), Origins())
