"""The rings' communicator: what it asks of its back end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fcp_cli.runtime import transport

pytestmark = pytest.mark.torch


class Options:
    """Stands for ProcessGroupNCCL.Options, which a build of torch for CPUs lacks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream


@pytest.mark.parametrize(
    ("backends", "device", "is_prior"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:gloo", "cuda", False),
        ("cpu:gloo,cuda:gloo", "cpu", False),
    ],
)
def test_hops_over_nccl_have_a_stream_of_high_priority(
    backends: str, device: str, is_prior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {"Options": Options}), raising=False)
    options: Any = transport._priority_options(torch.device(device))
    assert (options is not None and options.is_high_priority_stream) == is_prior
