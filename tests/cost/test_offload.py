from __future__ import annotations

import pytest

from fcp_cli.cost.model import offload_cost, profiled_offload_cost
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile

# Qwen3-8B in bf16: 16,384 tokens of width 4,096 in 36 layers; a layer's forward at 400 TFLOP/s takes 16 ms.
INPUT_BYTES = 16_384 * 4_096 * 2


def test_copies_hide_behind_layers_that_take_longer() -> None:
    cost = offload_cost(input_bytes=INPUT_BYTES, layers=36, forward_seconds=0.016, backward_seconds=0.048)
    assert cost.moved_bytes == 71 * INPUT_BYTES
    assert cost.copy_seconds == pytest.approx(71 * 0.00537, rel=1e-3)
    assert cost.visible_seconds == 0.0
    assert cost.hidden_seconds == cost.copy_seconds


def test_what_a_layer_does_not_hide_is_waited_for() -> None:
    cost = offload_cost(
        input_bytes=4e9, layers=3, forward_seconds=0.5, backward_seconds=1.5, bytes_per_second=2e9
    )  # a copy takes 2 s
    assert cost.visible_seconds == pytest.approx(3 * 1.5 + 2 * 0.5)
    assert cost.hidden_seconds == pytest.approx(3 * 0.5 + 2 * 1.5)


def test_times_of_layers_come_from_a_cost_profile() -> None:
    profile = CostProfile(
        model="qwen3-8b",
        cluster="by hand",
        origin="assumed",
        coefficients=Coefficients(
            attention_seconds_per_token2=0, linear_seconds_per_token=36e-6, ring_bytes_per_token=0, microbatch_seconds=0
        ),
        bandwidth=Bandwidth(intra_node=1, inter_node=1),
    )
    figures = {"tokens": 16_384, "layers": 36, "input_bytes_per_token": 8192}
    fast = profiled_offload_cost(profile, **figures, bytes_per_second=8192 / 0.2e-6)  # a token's forward takes 0.25 us
    slow = profiled_offload_cost(profile, **figures, bytes_per_second=8192 / 0.5e-6)
    assert fast.visible_seconds == 0.0
    assert slow.visible_seconds == pytest.approx(36 * 16_384 * 0.25e-6)


def test_one_layer_sends_its_input_for_nothing() -> None:
    cost = offload_cost(input_bytes=1e9, layers=1, forward_seconds=1.0, backward_seconds=1.0)
    assert (cost.moved_bytes, cost.visible_seconds) == (1e9, 0.0)
