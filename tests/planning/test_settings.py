"""What is assumed where nothing was said."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.console import Origins
from fcp_cli.errors import UsageError
from fcp_cli.planning.settings import PlanRequest, resolve
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
    assert origins.assumed["--tokens-per-rank"] == "2001 (as given, but the profile's memory holds 2000)"
    origins = Origins()
    resolve(PlanRequest(manifest=DATASET, tokens_per_rank=2000), origins)
    assert "--tokens-per-rank" not in origins.assumed


def test_without_memory_figures_the_budget_is_assumed(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    assert resolve(PlanRequest(manifest=DATASET), Origins()).problem.tokens_per_rank == 16384


def test_memory_without_room_is_refused(folder: Path) -> None:
    (folder / "profile.yaml").write_text(
        PROFILE + "memory: {bytes_per_token: 1000, model_state_bytes: 9000, capacity_bytes: 9000}\n"
    )
    with pytest.raises(UsageError, match="memory leaves no room for tokens; give --tokens-per-rank"):
        resolve(PlanRequest(manifest=DATASET), Origins())


def test_an_unknown_cluster_needs_the_number_of_ranks(folder: Path) -> None:
    (folder / "profile.yaml").write_text(PROFILE.replace("example-8x8", "elsewhere"))
    with pytest.raises(UsageError, match="cluster 'elsewhere' is not known here; give --ranks"):
        resolve(PlanRequest(manifest=DATASET), Origins())


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_headroom_is_a_fraction(headroom: float) -> None:
    with pytest.raises(UsageError, match=r"--headroom is .* it must be a fraction"):
        resolve(PlanRequest(manifest=DATASET, headroom=headroom), Origins())
