"""Words the verdict of `fcp plan` and `fcp compare`: at most four lines of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, Final

from fcp_cli.planning.dataset.verdict import MEGATRON, Rival, Verdict
from fcp_cli.words import counted

_WIDTH, _MOST_LINES = 80, 4
_WHOLE_FLAGS: Final[dict[str, Any]] = {"break_long_words": False, "break_on_hyphens": False}
_EQUAL = 0.0005  # rounds to zero when shown
_ALIKE = 0.01  # below this gain, a plan is not worth the effort


def verdict_lines(verdict: Verdict) -> list[str]:
    """Say whether a plan pays off, what it saves, and which remedies would help more."""
    sentences = list(_sentences(verdict))
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, _WIDTH, **_WHOLE_FLAGS)]
    return lines if len(lines) <= _MOST_LINES else textwrap.wrap(" ".join(sentences), _WIDTH, **_WHOLE_FLAGS)


def _sentences(verdict: Verdict) -> Iterator[str]:
    best = verdict.quickest_rival
    if best is None:
        return
    gain = 1.0 - 1.0 / best.factor
    if gain >= _ALIKE:
        yield f"Worth it: {verdict.solver} takes {gain:.0%} less time than {best.label}."
    else:
        best = _simplest(best, verdict)
        gain = 1.0 - 1.0 / best.factor
        if gain <= -_ALIKE:
            than = f"is {1 - best.factor:.0%} quicker"
        else:
            than = "takes as long" if abs(gain) < _EQUAL else f"takes {abs(gain):.1%} {'more' if gain > 0 else 'less'}"
        where = " if you train with Megatron" if best.name == MEGATRON else ""
        yield f"Not worth it: {best.label} {than}; use it{where}."
    hours, saved = verdict.device_hours, verdict.saved_device_hours
    each = [f"{verdict.solver} {_amount(hours)}"]
    each += [f"{one.label} {_amount(one.factor * hours)}{_on(one.steps, verdict)}" for one in verdict.rivals]
    price = verdict.device_hour_price
    money = f"; {_amount(saved * price)} saved at {price:g} each" if price is not None and gain >= _ALIKE else ""
    yield f"Device-hours an epoch: {', '.join(each)}{money}."
    remedy = verdict.remedy
    if verdict.enough_ranks is not None:
        some = counted(verdict.enough_ranks, "rank")
        yield f"{verdict.num_ranks} ranks are too many for these batches: {some} with this budget would be as fast."
    elif remedy is not None:
        room = "" if "--tokens-per-rank" in remedy.flags else f" ({counted(remedy.tokens_per_rank, 'token')} a rank)"
        is_said = any(one.steps == remedy.steps for one in verdict.rivals)
        where = "" if is_said else _on(remedy.steps, verdict)
        yield f"What helps more: {remedy.flags}{room}: {1 - remedy.factor:.0%} less{where}."
    elif verdict.tried and verdict.profile is not None:
        way = "plan without it to search others" if verdict.profile == "analytic" else "fcp profile measures others"
        yield f"No other sync or token budget would help; the profile is of this recipe: {way}."
    elif verdict.tried:
        yield "No other recomputation, sync or token budget that fits would help."


def _simplest(best: Rival, verdict: Verdict) -> Rival:
    """Return the static plan if it is about as fast as the best rival: every framework supports it."""
    static = next((one for one in verdict.rivals if one.name == "static"), best)
    return static if static.factor < best.factor + _ALIKE and 1.0 - 1.0 / static.factor < _ALIKE else best


def _on(steps: int, verdict: Verdict) -> str:
    return "" if steps == verdict.steps else f" (on {counted(steps, 'step')})"


def _amount(value: float) -> str:
    """Format with three digits, or as an integer from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
