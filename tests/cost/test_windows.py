"""Layers that attend to a window: what they cost, fits of them, and where attention overtakes the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fcp_cli.cost.explain import break_even_tokens, seconds_table
from fcp_cli.cost.fitting import Sample, fit_profile, predicted_seconds
from fcp_cli.cost.model import attention_seconds
from fcp_cli.cost.profile import Coefficients, CostProfile, dump_cost_profile, parse_cost_profile
from fcp_cli.models.shipped import shipped_profile

GEMMA = shipped_profile("gemma3-27b")


def _of(**changes: float) -> CostProfile:
    return replace(GEMMA, coefficients=replace(GEMMA.coefficients, **changes))


def _attention(c: Coefficients, *lengths: float) -> list[float]:
    return list(attention_seconds(c, np.array(lengths)))


def test_a_window_costs_as_full_attention_within_it_and_grows_with_the_length_beyond() -> None:
    alone = _of(attention_seconds_per_token2=0.0).coefficients
    full = _of(attention_seconds_per_token2=alone.window_seconds_per_token2, window_seconds_per_token2=0.0).coefficients
    assert _attention(alone, 17, 1024) == pytest.approx(_attention(full, 17, 1024))
    once, twice, thrice = _attention(alone, 100_000, 200_000, 300_000)
    assert thrice - twice == pytest.approx(twice - once)
    assert once < 0.03 * _attention(full, 100_000)[0]


def test_windows_of_any_length_are_full_attention() -> None:
    c = GEMMA.coefficients
    wide = replace(c, window_tokens=1e9)
    both = replace(c, attention_seconds_per_token2=c.attention_seconds_per_token2 + c.window_seconds_per_token2)
    assert _attention(wide, 5000) == pytest.approx(_attention(replace(both, window_seconds_per_token2=0.0), 5000))


def test_a_profile_with_windows_is_written_and_read() -> None:
    assert parse_cost_profile(dump_cost_profile(GEMMA), name="x") == GEMMA
    assert "window" not in dump_cost_profile(shipped_profile("qwen3-8b"))


@pytest.mark.parametrize("full", [GEMMA.coefficients.attention_seconds_per_token2, 0.0])
def test_a_fit_scales_windows_with_what_is_measured_of_attention(full: float) -> None:
    truth = _of(attention_seconds_per_token2=full, window_seconds_per_token2=3e-8)
    packs = [(256, 256), (512,), (2048,), (4096, 4096), (30_000,), (16_384, 128), (100_000,)]
    samples = [Sample(lengths=pack, degree=1, seconds=1.0) for pack in packs]
    seconds = predicted_seconds(samples, truth)
    samples = [replace(sample, seconds=float(value)) for sample, value in zip(samples, seconds, strict=True)]
    prior = _of(attention_seconds_per_token2=full / 2, window_seconds_per_token2=1.5e-8)
    found = fit_profile(samples, prior).profile.coefficients
    assert found.window_seconds_per_token2 == pytest.approx(3e-8, rel=1e-3)
    assert found.attention_seconds_per_token2 == pytest.approx(full, rel=1e-3)


def test_attention_overtakes_the_rest_at_the_length_that_the_table_of_seconds_says() -> None:
    length = break_even_tokens(GEMMA)
    assert length is not None and length > GEMMA.coefficients.window_tokens
    alone = _of(linear_seconds_per_token=0.0, microbatch_seconds=0.0)
    linear = GEMMA.coefficients.linear_seconds_per_token * round(length)
    assert seconds_table(alone, [round(length)], [1])[0, 0] == pytest.approx(linear, rel=1e-4)
    assert break_even_tokens(_of(attention_seconds_per_token2=0.0)) is None  # windows alone never do
