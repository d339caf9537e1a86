from __future__ import annotations

import subprocess
import sys

import pytest

import fcp_cli.runtime as runtime
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.torch


def test_the_public_names_of_the_runtime_are_these() -> None:
    assert runtime.__all__ == [
        "ActivationOffload",
        "Fetch",
        "FollowsPlan",
        "GradientSync",
        "LocalMicroBatch",
        "MicroBatchTiming",
        "PlanSampler",
        "Ring",
        "Session",
        "Step",
        "attention",
        "current_ring",
        "keep_attention",
        "keep_products",
        "mixed_fetch",
        "outside",
        "recomputed",
        "start",
        "steps",
        "stopping",
    ]
    assert all(hasattr(runtime, name) for name in runtime.__all__)


@pytest.mark.processes
def test_training_and_verifying_need_neither_the_planner_nor_the_command_line() -> None:
    program = (
        "import sys, fcp_cli.runtime, fcp_cli.verification.verify\n"
        "unwanted = ('fcp_cli.planning', 'fcp_cli.cost.profile', 'fcp_cli.cost.model', 'typer', 'rich')\n"
        "print(*[name for name in sys.modules if name.startswith(unwanted)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert done.stdout.split() == []
