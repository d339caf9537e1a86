"""Paced ranks, of `fcp demo` and `make pace`: they sleep what a profile says, over a real runtime."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from benchmarks.pace import lines
from fcp_cli.cli.paced import PacedWork, paced_profile, run, write_plans
from fcp_cli.cli.paced_ranks import HEAD_DIM, LAYERS, Device, Links, PacedKernel, PacedTransport
from fcp_cli.manifest.table import LengthTable
from fcp_cli.runtime.layout import shard_layout

pytestmark = pytest.mark.torch


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves; a test may move it, too."""
    at = [100.0]

    def sleep(seconds: float) -> None:
        at[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: at[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return at


def test_attention_on_a_ring_sleeps_what_the_profile_says_of_the_whole_pack(now: list[float]) -> None:
    coefficients = paced_profile(8, 1.0).coefficients
    lengths, degree = (1000, 64, 3000), 4
    layout = shard_layout(lengths, degree)
    slept = []
    for member in range(degree):
        device = Device()
        kernel = PacedKernel(device, coefficients)
        device.hold(now[0])
        began = now[0]
        for source in range(degree):
            for work in layout.ring.hops(member, source):
                rows = torch.zeros(sum(work.segments.q_lengths), 1, 1)
                keys = torch.zeros(sum(work.segments.k_lengths), 1, 1)
                out, lse = kernel.forward(rows, keys, keys, work.segments, 1.0)
                kernel.backward(rows, rows, keys, keys, out, lse, work.segments, 1.0)
        slept.append(LAYERS * (now[0] - began))
    whole = coefficients.attention_seconds_per_token2 * sum(length**2 for length in lengths)
    assert sum(slept) == pytest.approx(whole, rel=1e-9)
    assert slept == pytest.approx([whole / degree] * degree, rel=0.01)  # zig-zag


def test_a_device_that_was_late_in_waking_makes_no_work_longer(now: list[float]) -> None:
    device = Device()
    device.hold(now[0])
    device.run(1.0)
    now[0] += 0.25  # it overslept, and the host then prepared the next piece
    device.run(1.0)
    assert now[0] == 102.0


def test_what_the_host_prepares_for_longer_than_the_device_was_busy_is_waited_for(now: list[float]) -> None:
    device = Device()
    device.hold(now[0])
    device.run(1.0)
    now[0] += 3.0
    device.run(1.0)
    assert now[0] == 104.0  # the host began to prepare when the device did, a second before 101


class Hop:
    def __init__(self, now: list[float], seconds: float) -> None:
        self.now, self.seconds = now, seconds

    def wait(self) -> None:
        self.now[0] += self.seconds


class Messages:
    """A transport on which waiting takes so many seconds."""

    def __init__(self, now: list[float], seconds: float) -> None:
        self.now, self.seconds = now, seconds

    def start(self, kind: str, send: object, to: int, receive: object, source: int) -> Hop:
        return Hop(self.now, self.seconds)


def test_a_device_goes_on_when_a_late_message_has_come(now: list[float]) -> None:
    device, links = Device(), Links(profile=paced_profile(8, 1.0), rank=0, ranks_per_node=4)
    message = torch.zeros(1000)
    early, late = (PacedTransport(Messages(now, seconds), device, links) for seconds in (1e-5, 0.5))
    device.hold(now[0])
    hop = early.start("kv", message, 1, message, 3)
    device.run(1.0)
    hop.wait()  # long there
    device.run(1.0)
    assert now[0] == pytest.approx(102.0)
    late.start("kv", message, 1, message, 3).wait()
    device.run(1.0)
    assert now[0] == pytest.approx(103.5, abs=1e-4)


def test_a_message_arrives_no_sooner_than_over_the_links_of_the_profile(now: list[float]) -> None:
    profile = paced_profile(8, 1.0)
    device, links = Device(), Links(profile=profile, rank=0, ranks_per_node=4)
    transport = PacedTransport(Messages(now, 0.0), device, links)
    tokens = 10_000
    keys = torch.zeros(2 * tokens * HEAD_DIM, dtype=torch.bfloat16)  # a quarter of what a layer's ring sends
    for peer, rate in ((1, profile.bandwidth.intra_node), (4, profile.bandwidth.inter_node)):
        began = now[0]
        transport.start("kv", keys, peer, None, 3).wait()
        c = profile.coefficients
        layer = (c.ring_hop_seconds / 2 + tokens * c.ring_bytes_per_token / 4 / rate) / LAYERS
        assert now[0] - began == pytest.approx(layer)


@pytest.mark.full
@pytest.mark.distributed
def test_four_ranks_take_the_seconds_that_their_plans_predict(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(64, 2000, 32)
    lengths[::8] = 7000
    table = LengthTable(name="drawn", length_tokens=lengths.astype(np.int64))
    work = PacedWork(table=table, steps=2, tokens_per_rank=2048, max_length=8192, slower=1.0)
    outcomes = run(write_plans(tmp_path, work, num_ranks=4, strategies=("static", "fcp")), num_ranks=4)
    for outcome in outcomes.values():
        # A busy machine makes steps longer, and nothing makes them shorter.
        assert 0.98 < outcome.measured_seconds / outcome.predicted_seconds < 3.0
    assert len(lines(4, outcomes)) == 2
