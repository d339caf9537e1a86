"""Levels of recomputation as needed: their line over tokens, the layers that follow from it, and levels of files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.cost.formula import recomputation_seconds
from fcp_cli.cost.levels import RecomputeLevel, cheapest_tokens, convex, layers_by_level
from fcp_cli.cost.model import unit_prices
from fcp_cli.cost.profile import CostProfile, dump_cost_profile, parse_cost_profile
from fcp_cli.errors import ProfileError

_KINDS = ("none", "activation", "elementwise", "selective")
_PROFILE = """\
format: fcp-cost-profile/1
origin: assumed
coefficients: {{attention_seconds_per_token2: 1.0e-9, linear_seconds_per_token: 1.0e-4, ring_bytes_per_token: 1.0, \
microbatch_seconds: 0.01}}
bandwidth_bytes_per_second: {{intra_node: 1.0e+9, inter_node: 1.0e+9}}
recipe: {{recompute: {recompute}}}
{levels}"""


def profile(levels: str, recompute: str = "as-needed") -> CostProfile:
    return parse_cost_profile(_PROFILE.format(recompute=recompute, levels=levels), name="p.yaml")


def level(kind: str, tokens: int, seconds: float = 0.0) -> str:
    return f"- {{recompute: {kind}, tokens: {tokens}, seconds_per_token: {seconds}}}\n"


@st.composite
def drawn_levels(draw: st.DrawFn) -> list[RecomputeLevel]:
    tokens = draw(st.lists(st.integers(1, 50_000), min_size=2, max_size=4))
    seconds = [0.0, *draw(st.lists(st.floats(0, 1e-4), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
    return [
        RecomputeLevel(recompute=kind, tokens=count, seconds_per_token=cost)  # type: ignore[arg-type]
        for kind, count, cost in zip(_KINDS, tokens, seconds, strict=False)
    ]


@given(drawn_levels())
def test_of_any_levels_those_that_pay_are_convex_and_a_file_holds_them(drawn: list[RecomputeLevel]) -> None:
    kept = convex(drawn)
    assert set(kept) <= set(drawn)
    assert kept[-1].tokens == max(one.tokens for one in drawn)
    if len(kept) > 1 and kept[0].seconds_per_token == 0:
        read = profile("recompute_levels:\n" + "".join(level(*_fields(one)) for one in kept))
        assert read.recompute_levels == kept
        assert parse_cost_profile(dump_cost_profile(read), name="again").recompute_levels == kept
        for one in drawn:  # none is cheaper than the mix of those that were kept
            paid = float(recomputation_seconds(float(one.tokens), 1, unit_prices(read)))
            assert paid <= one.seconds_per_token * one.tokens + 1e-9


def _fields(one: RecomputeLevel) -> tuple[str, int, float]:
    return one.recompute, one.tokens, one.seconds_per_token


@given(drawn_levels(), st.integers(1, 60_000), st.integers(1, 100))
def test_as_few_layers_as_the_tokens_need_recompute_more(drawn: list[RecomputeLevel], tokens: int, layers: int) -> None:
    levels = convex(drawn)
    number, count = layers_by_level(levels, tokens, layers)
    assert 0 <= number < len(levels)
    assert 0 < count <= layers

    # A layer keeps 1 / tokens of its level's room per token: with these layers all fits, with one fewer it does not.
    def room(more: int) -> float:
        of_high, of_low = tokens / levels[number].tokens, tokens / levels[max(number - 1, 0)].tokens
        return more / layers * of_high + (layers - more) / layers * of_low

    if tokens <= levels[-1].tokens:
        assert room(count) <= 1 + 1e-6
    if number and tokens <= levels[number].tokens:
        assert room(count - 1) > 1 - 1e-6


def test_the_seconds_rise_along_the_lines_between_levels_on_floats_and_arrays() -> None:
    found = profile(
        "recompute_levels:\n" + level("none", 1000) + level("activation", 2000, 1e-5) + level("selective", 5000, 4e-5)
    )
    prices = unit_prices(found)
    tokens = np.array([500, 1000, 1500, 2000, 3500, 5000])
    expected = [0.0, 0.0, 0.01, 0.02, 0.11, 0.2]
    assert recomputation_seconds(tokens, 1, prices) == pytest.approx(expected)
    assert recomputation_seconds(4 * tokens, 4, prices) == pytest.approx(expected)
    assert [float(recomputation_seconds(float(t), 1, prices)) for t in tokens] == list(
        recomputation_seconds(tokens.astype(float), 1, prices)
    )


@pytest.mark.parametrize(("fixed", "tokens"), [(0.001, 1000), (0.03, 2000), (0.2, 5000)])
def test_a_full_micro_batch_has_the_tokens_that_cost_the_least_each(fixed: float, tokens: int) -> None:
    found = profile(
        "recompute_levels:\n" + level("none", 1000) + level("activation", 2000, 1e-5) + level("selective", 5000, 4e-5)
    )
    assert cheapest_tokens(found.recompute_levels, fixed) == tokens
    counts = np.arange(100, 5001)
    rates = (fixed + recomputation_seconds(counts, 1, unit_prices(found))) / counts
    assert counts[np.argmin(rates)] == tokens


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("".join(level("none", 10 * n) for n in range(1, 6)), r"recompute_levels has 5 levels; at most 4"),
        (level("none", 10, 1.0) + level("selective", 20, 2.0), r"\[0\]\.seconds_per_token is 1; it must be 0"),
        (level("none", 20) + level("selective", 10, 2.0), r"tokens are \[20, 10\]; they must rise"),
        (
            level("none", 10) + level("activation", 20, 2.0) + level("selective", 40, 1.5),
            r"a further token takes \[4\.0, 1\.0\] seconds from level to level; these must rise",
        ),
        (level("full", 10) + level("selective", 20), r"recompute_levels\[0\]\.recompute"),
    ],
)
def test_a_file_whose_levels_are_no_mix_is_one_line(levels: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as raised:
        profile("recompute_levels:\n" + levels)
    assert "\n" not in str(raised.value)


def test_levels_and_their_recipe_come_together() -> None:
    with pytest.raises(ProfileError, match=r"recompute_levels come with recipe\.recompute: as-needed"):
        profile("recompute_levels:\n" + level("none", 10) + level("selective", 20, 1.0), recompute="selective")
    with pytest.raises(ProfileError, match="neither without the other"):
        profile("")
