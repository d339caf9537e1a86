"""All ranks send gradients around rings in one type."""

from __future__ import annotations

import pytest
import torch
from inline_snapshot import snapshot

from fcp_cli.runtime.rank_agreement import GRAD_RING_VARIABLE, agreed_grad_dtype
from fcp_cli.verification.emulation import ThreadWorld, run_ranks
from tests.messages import raises

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def agreed(monkeypatch: pytest.MonkeyPatch, variable: str | None, given: list[str | None]) -> list[str]:
    if variable is not None:
        monkeypatch.setenv(GRAD_RING_VARIABLE, variable)
    else:
        monkeypatch.delenv(GRAD_RING_VARIABLE, raising=False)
    return run_ranks(len(given), lambda meeting, rank: agreed_grad_dtype(ThreadWorld(meeting, rank), CPU, given[rank]))  # type: ignore[arg-type]


def test_it_is_fp32_unless_the_script_or_the_variable_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, None, [None, None]) == ["fp32", "fp32"]
    assert agreed(monkeypatch, "bf16", [None, None]) == ["bf16", "bf16"]
    assert agreed(monkeypatch, "bf16", ["fp32", "fp32"]) == ["fp32", "fp32"]


def test_ranks_that_differ_or_a_word_that_is_none_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(
        snapshot(
            "RunError: gradients travel in fp32 on rank 0, but rank 2 has another FCP_GRAD_RING_DTYPE; set it alike on all nodes"
        )
    ):
        agreed(monkeypatch, None, [None, "fp32", "bf16"])
    with raises(snapshot("RunError: FCP_GRAD_RING_DTYPE is 'half'; it must be one of fp32, bf16")):
        agreed(monkeypatch, "half", [None, None])
