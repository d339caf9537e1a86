"""A job that plans while it trains: the losses of the plan made before, on ranks that provably follow the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import manifest_of
from fcp_cli.verification.emulation import gradients_alone
from fcp_cli.verification.tiny_model import TinyLanguageModel, plain_attend
from tests.planning.examples import PROFILE
from tests.runtime.launch import run_worker
from tests.runtime.workers.online_worker import CONFIG, tokens_of

pytestmark = [pytest.mark.torch, pytest.mark.distributed, pytest.mark.full]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    (folder / "profile.yaml").write_text(PROFILE)
    return folder


@pytest.fixture(scope="module")
def left(folder: Path) -> dict[str, list[Any]]:
    """What each of four ranks left of each case."""
    return run_worker("online_worker", folder, num_ranks=4)


def test_lengths_drawn_at_run_time_train_as_under_the_plan_made_before_and_as_in_one_process(
    folder: Path, left: dict[str, list[Any]]
) -> None:
    plan = folder / "online.parquet"
    assert len({len(row.ranks) for step in PlanReader(plan).steps() for row in step.microbatches()}) > 1
    with torch.random.fork_rng():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        model = TinyLanguageModel(CONFIG, plain_attend)
        alone = gradients_alone(plan, tokens_of, model, model)
        torch.set_default_dtype(before)
    for online, offline in zip(left["online"], left["offline"], strict=True):
        assert len(online["losses"]) == 6 and online["lengths"] == offline["lengths"]
        assert online["losses"] == offline["losses"]
        for one, other in zip(online["gradients"], offline["gradients"], strict=True):
            assert one.tobytes() == other.tobytes()
        np.testing.assert_allclose(online["losses"], alone.losses, rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.stack(online["gradients"]), alone.gradients, rtol=0, atol=1e-12)


def test_what_was_planned_is_a_plan_and_a_run_begun_again_ends_with_the_same(
    folder: Path, left: dict[str, list[Any]]
) -> None:
    whole, restarted = folder / "online.parquet", folder / "restarted.parquet"
    assert list(check_plan(whole, manifest=read_manifest(manifest_of(whole)))) == []
    assert left["restarted"][1]["losses"] == left["online"][1]["losses"]
    steps = [list(PlanReader(path).steps()) for path in (whole, restarted)]
    assert [step.to_dict() for step in steps[0]] == [step.to_dict() for step in steps[1]]


def test_a_batch_that_depends_on_the_step_before_is_not_asked_for_before_it(
    folder: Path, left: dict[str, list[Any]]
) -> None:
    assert [found["trained"] for found in left["policy"]] == 4 * [[0, 1, 2, 3]]
    assert [len(step.sequences) for step in PlanReader(folder / "policy.parquet").steps()] == [2, 3, 4, 5]


def test_a_rank_that_is_thirty_percent_slower_gets_less_work_once_it_was_measured(
    folder: Path, left: dict[str, list[Any]]
) -> None:
    found = left["slow"][0]
    plan = folder / "slow.parquet"
    refits = PlanReader(plan).metadata.refits
    assert refits is not None and refits[0].first_step == 4 and list(check_plan(plan)) == []
    assert refits[-1].rank_speeds == {"2": pytest.approx(0.7, abs=0.1)}
    # When the last micro-batch ends: what closes a step is the machine's. From the second refit on, prices are right, too.
    assert np.median(found["slow"][8:]) < 0.9 * np.median(found["blind"][8:])


def test_rows_of_a_data_loader_with_a_shuffle_buffer_are_trained_as_they_come(
    folder: Path, left: dict[str, list[Any]]
) -> None:
    found = left["rows"]
    assert len({tuple(rank["losses"]) for rank in found}) == 1 and len(found[0]["losses"]) == 6
    lengths = np.sort(read_manifest(manifest_of(folder / "rows.parquet")).length_tokens)
    assert lengths.tolist() == sorted(len(tokens_of(number)) for number in range(36))
