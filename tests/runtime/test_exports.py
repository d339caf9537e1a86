import pytest

import fcp_cli.runtime as runtime

pytestmark = pytest.mark.torch


def test_the_public_names_of_the_runtime_are_these() -> None:
    assert runtime.__all__ == [
        "Fetch",
        "LocalMicroBatch",
        "MicroBatchTiming",
        "Ring",
        "Session",
        "Step",
        "attention",
        "current_ring",
        "start",
        "steps",
    ]
    assert all(hasattr(runtime, name) for name in runtime.__all__)
