"""Rings over real processes: groups of any ranks that change with every micro-batch, on one communicator."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.runtime.launch import torchrun

pytestmark = [pytest.mark.torch, pytest.mark.distributed]


@cache
def run_job(num_ranks: int, staged: bool) -> dict[str, Any]:
    """What rank 0 of the worker reports; one launch serves all tests."""
    words = ["-m", "tests.runtime.workers.ring_worker", *(["--staged"] if staged else [])]
    report: dict[str, Any] = json.loads(torchrun(*words, num_ranks=num_ranks).splitlines()[-1])
    return report


# Five ranks run staged through buffers of their own, as accelerators under gloo do.
@pytest.fixture(params=[(4, False), (5, True)], ids=["4-ranks", "5-ranks-staged"])
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_job(*request.param)


def test_every_rank_computes_what_one_process_does(report: dict[str, Any]) -> None:
    """fp64 within 1e-12 absolute, fp32 within 2e-6 relative, with and without recomputation."""
    assert report["worst_share_of_tolerance"] <= 1.0
    assert report["degrees"] == list(range(1, report["num_ranks"] + 1))
    if report["num_ranks"] == 4:
        assert report["sharing"] == [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    assert report["value_dims"] == [5, 8, 11]
    assert report["modes"] == ["non-reentrant", "plain", "reentrant"]
    assert report["dtypes"] == ["torch.float32", "torch.float64"]
    assert set(report["windowed"]) >= {1, 2, 3, 4}
    assert report["windowed and masked"] > 5
    assert {degree for degree, _ in report["masked"]} >= {1, 2, 3, 4}
    assert {mode for _, mode in report["masked"]} == {"non-reentrant", "plain", "reentrant"}


def test_after_warm_up_no_communicator_is_created(report: dict[str, Any]) -> None:
    assert report["groups"] > 10
    assert report["communicators_created"] == 0


def test_the_recorded_order_would_not_block(report: dict[str, Any]) -> None:
    assert report["messages"] > 500
    assert report["order_fault"] == ""
