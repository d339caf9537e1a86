from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.live_memory import LiveMemory

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("fake", [False, True])
def test_storages_count_from_their_making_until_they_are_freed(fake: bool) -> None:
    memory = LiveMemory()
    with FakeTensorMode() if fake else torch.no_grad(), memory.counting():
        first = torch.zeros(1000)
        view = first[:10]  # of the same storage
        second = first + 1
        assert memory.live_bytes == 8000
        del first
        assert memory.live_bytes == 8000
        del view
        assert memory.live_bytes == 4000
        del second
    assert memory.live_bytes == 0
    assert memory.peak_bytes == 8000


def test_a_resized_storage_counts_with_its_new_size() -> None:
    memory = LiveMemory()
    with memory.counting():
        gathered = torch.zeros(1000)
        gathered.untyped_storage().resize_(0)
        assert memory.live_bytes == 0
        gathered.untyped_storage().resize_(8000)
    assert memory.peak_bytes == 8000


def test_the_peak_names_its_makers() -> None:
    memory = LiveMemory(maker=lambda operation: operation)
    with memory.counting():
        kept = torch.zeros(100) * 2
        torch.ones(1000)
    assert memory.peak_makers == {"aten.mul.Tensor": 400, "aten.ones.default": 4000}
    del kept


def test_a_peak_can_be_forgotten() -> None:
    memory = LiveMemory()
    with memory.counting():
        kept = torch.zeros(10)
        torch.zeros(1000)
        memory.reset_peak()
    assert memory.peak_bytes == 40
    del kept
