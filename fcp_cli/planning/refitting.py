"""Refit of the cost model to measured micro-batches: factors on coefficients, and speeds of persistent stragglers.

With f the factors on the profile's coefficients, the model of a micro-batch of y seconds is

    y = max(f0 beta + f1 linear + max(f2 attention, f3 hidden) + f3 exposed, f0 host) / speed of its slowest rank

plus f2 windows in the first, the device's clock. `hidden` and `exposed` are the parts of the ring
(`cost.formula.pack_parts`), and `exposed` also has the Ulysses exchange and the halo exchange of window layers. The
factors minimize the Huber loss of relative errors, regularized towards their previous values if micro-batches do not
determine them. A rank's speed is the ratio of its single-rank micro-batches to those of the other ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, replace
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from fcp_cli.cost.model import clocks, group_terms, halo_seconds, pack_parts, recomputation_seconds
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import MOST_FACTOR, Factors, ScheduledRefit, refit_text
from fcp_cli.plan.pricing import pack_work, place_of_groups, single_rank_work
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.problem import Problem
from fcp_cli.util.arrays import FloatArray, IntArray

LEAST_MICROBATCHES: Final = 8
_STEPS_KEPT: Final = 512
_OUTLIER: Final = 0.05  # relative error beyond which errors count linearly
_ROUNDS: Final = 30  # of iteratively reweighted least squares
_HELD: Final = 1e-3  # weight of the previous factors relative to all micro-batches
MOST_CHANGE: Final = 2.0
"""By which a factor of a measured profile changes in one refit at most."""
_LEAST_CHANGE: Final = 0.02  # least mean relative change of predictions for new factors to be adopted
_SLOW: Final = 0.95  # speed below which a rank is a straggler
_PERSISTENT: Final = 0.75  # share of steps in which it must be slow
_LEAST_SPEED_CHANGE: Final = 0.03
_SLOWEST: Final = 0.1


class _Parts(NamedTuple):
    """Parts of the predicted seconds of micro-batches under the original profile, and their measured seconds."""

    step: IntArray
    rank: IntArray  # of a single-rank micro-batch; -1 for a ring
    beta: FloatArray
    linear: FloatArray
    windows: FloatArray  # window attention with a halo exchange
    attention: FloatArray
    hidden: FloatArray  # communication that attention hides, if it takes longer
    exposed: FloatArray
    host: FloatArray  # in which the host issues them
    ranks: list[IntArray]
    measured: FloatArray


class Refitter:
    """Refitter of the cost profile of a stream or job.

    Args:
        problem: original problem, without any refit.
        most_change: largest change of a factor in one refit, as a ratio.
    """

    def __init__(self, problem: Problem, *, most_change: float = MOST_CHANGE) -> None:
        self._problem, self._most_change = problem, most_change
        self._kept: deque[tuple[StepPlan, LengthTable]] = deque(maxlen=_STEPS_KEPT)

    def keep(self, step: StepPlan, sequences: LengthTable) -> None:
        """Remember a planned step, with its sequences in step order."""
        self._kept.append((step, sequences))

    def refit(
        self, first_step: int, measured: pa.Table, before: ScheduledRefit | None
    ) -> tuple[ScheduledRefit | None, str]:
        """Return the refit from a step on, or None if nothing changes, and a line of explanation.

        Args:
            first_step: first step that the refit will apply to.
            measured: columns step, order, rank and seconds of trained micro-batches.
            before: current refit, or None.
        """
        parts = self._parts(measured)
        if len(parts.measured) < LEAST_MICROBATCHES:
            return None, f"{len(parts.measured)} micro-batches were measured, too few to refit"
        old = before or ScheduledRefit(first_step=0)
        given = np.array(self._problem.rank_speeds or (1.0,) * self._problem.num_ranks)
        speeds = np.array([old.rank_speeds.get(str(rank), given[rank]) for rank in range(len(given))])
        factors = np.array(list(asdict(old.factors).values()))
        fitted = factors
        for _ in range(2):  # alternate, since slow ranks and high prices explain the same seconds
            slowest = np.array([float(speeds[ranks].min()) for ranks in parts.ranks])
            fitted = self._fitted(parts, factors, slowest)
            speeds = _speeds(parts, self._predicted(parts, fitted), speeds, given)
        change = self._predicted(parts, fitted) / self._predicted(parts, factors) - 1.0
        if np.abs(change).mean() < _LEAST_CHANGE:
            fitted = factors
        named = {str(rank): float(speeds[rank]) for rank in np.flatnonzero(speeds != given).tolist()}
        factors_found = Factors(**dict(zip(asdict(Factors()), fitted.tolist(), strict=True)))
        found = ScheduledRefit(first_step=first_step, factors=factors_found, rank_speeds=named)
        about = f"{len(parts.measured)} micro-batches of {len(np.unique(parts.step))} steps"
        if replace(found, first_step=0) == replace(old, first_step=0):
            return None, f"{about} are as planned"
        return found, f"{about}: {refit_text(found)}"

    def _parts(self, measured: pa.Table) -> _Parts:
        taken: dict[tuple[int, int], float] = {}
        columns = (measured.column(name).to_pylist() for name in ("step", "order", "seconds"))
        for step, order, seconds in zip(
            *columns, strict=True
        ):  # the minimum: the last rank to enter a ring did not wait
            taken[step, order] = min(seconds, taken.get((step, order), np.inf))
        wanted = {step for step, _order in taken}
        found: list[_Parts] = []
        for step, sequences in self._kept:
            if step.step in wanted:
                found.append(self._parts_of(step, sequences, taken))
        none = np.zeros(0)
        whole = [np.zeros(0, dtype=np.int64)]

        def joined(name: str) -> FloatArray:
            return np.concatenate([none, *(getattr(part, name) for part in found)])

        return _Parts(
            step=np.concatenate(whole + [part.step for part in found]),
            rank=np.concatenate(whole + [part.rank for part in found]),
            beta=joined("beta"),
            linear=joined("linear"),
            windows=joined("windows"),
            attention=joined("attention"),
            hidden=joined("hidden"),
            exposed=joined("exposed"),
            host=joined("host"),
            ranks=[ranks for part in found for ranks in part.ranks],
            measured=joined("measured"),
        )

    def _parts_of(self, step: StepPlan, sequences: LengthTable, taken: dict[tuple[int, int], float]) -> _Parts:
        problem, profile = self._problem, self._problem.profile
        seconds = np.array([taken.get((step.step, order), 0.0) for order in range(len(step))])
        rows = np.flatnonzero(~step.is_idle & (seconds > 0))
        working = np.flatnonzero(~step.is_idle)
        places = place_of_groups(step.rank_offsets, step.ranks, problem.ranks_per_node, step.heads_degree)
        place = {name: values[working] for name, values in places.items()}
        degree, terms = place["degree"], group_terms(profile, **place)
        offsets = np.append(step.sequence_offsets[working], step.sequence_offsets[-1])
        work = single_rank_work(sequences, profile, problem.padding_multiple)
        pack = pack_work(work, offsets, degree, profile, problem.padding_multiple)
        parts = pack_parts(profile, pack, **place)
        windows, exposed = np.zeros(len(degree)), parts.exposed + terms.exchange * pack.tokens + terms.messages
        if pack.windows is not None:
            windows = pack.windows.seconds / degree
            exposed = exposed + halo_seconds(profile, pack.windows, terms)
        at = np.searchsorted(working, rows)
        groups = [step.ranks[step.rank_offsets[row] : step.rank_offsets[row + 1]].astype(np.int64) for row in rows]
        return _Parts(
            step=np.full(len(rows), step.step),
            rank=np.array([group[0] if len(group) == 1 else -1 for group in groups], dtype=np.int64),
            beta=np.full(len(rows), profile.coefficients.microbatch_seconds),
            linear=(pack.linear_seconds / degree + recomputation_seconds(profile, pack.tokens, degree=degree))[at],
            windows=windows[at],
            attention=parts.attention[at],
            hidden=parts.hidden[at],
            exposed=exposed[at],
            host=clocks(profile, pack, **place)[1][at],
            ranks=groups,
            measured=seconds[rows],
        )

    def _columns(self, parts: _Parts, factors: FloatArray) -> FloatArray:
        """Return [micro-batches, 4] the seconds that each factor multiplies, with both maxima resolved at `factors`."""
        hides = factors[2] * parts.attention >= factors[3] * parts.hidden
        ring = np.where(hides, 0.0, parts.hidden) + parts.exposed
        attention = np.where(hides, parts.attention, 0.0) + parts.windows
        on_device = np.stack([parts.beta, parts.linear, attention, ring], axis=1)
        waits = factors[0] * parts.host > on_device @ factors
        return np.where(waits[:, None], np.outer(parts.host, (1.0, 0.0, 0.0, 0.0)), on_device)

    def _predicted(self, parts: _Parts, factors: FloatArray) -> FloatArray:
        return np.asarray(self._columns(parts, factors) @ factors)

    def _fitted(self, parts: _Parts, before: FloatArray, speed: FloatArray) -> FloatArray:
        """Return the factors that fit the measured seconds, given the speed of each micro-batch's slowest rank."""
        factors, count = before.copy(), len(parts.measured)
        held = np.sqrt(_HELD * count) * np.eye(len(before))
        for _ in range(_ROUNDS):
            relative = self._columns(parts, factors) / (speed * parts.measured)[:, None]
            error = np.abs(relative @ factors - 1.0)
            weight = np.sqrt(np.minimum(1.0, _OUTLIER / np.maximum(error, 1e-12)))
            left = np.concatenate((relative * weight[:, None], held * (weight**2).mean() ** 0.5))
            right = np.concatenate((weight, held @ before * (weight**2).mean() ** 0.5))
            factors = np.linalg.lstsq(left, right, rcond=None)[0]
            factors = np.clip(factors, before / self._most_change, before * self._most_change)
        factors = np.clip(factors, 1 / MOST_FACTOR, MOST_FACTOR)
        return np.array([float(f"{factor:.3g}") for factor in factors])


def _speeds(parts: _Parts, predicted: FloatArray, before: FloatArray, given: FloatArray) -> FloatArray:
    """Return [ranks] the speeds: measured for persistent stragglers, else the given one but at least 1."""
    ratio = parts.measured / predicted
    known = np.unique(parts.rank[parts.rank >= 0])
    if not len(known):
        return before
    of_steps = {
        rank: np.array([np.median(ratio[mine & (parts.step == step)]) for step in np.unique(parts.step[mine])])
        for rank in known.tolist()
        for mine in [parts.rank == rank]
    }
    medians = np.array([np.median(of_steps[rank]) for rank in known.tolist()])
    usual = float(np.sort(medians)[(len(medians) - 1) // 2])
    found: FloatArray = before.copy()
    for rank, median in zip(known.tolist(), medians.tolist(), strict=True):
        speed = float(f"{max(_SLOWEST, usual / median):.2g}")
        is_slow = speed < _SLOW and bool((usual / of_steps[rank] < _SLOW).mean() >= _PERSISTENT)
        speed = speed if is_slow else max(1.0, float(given[rank]))
        if abs(speed - before[rank]) >= _LEAST_SPEED_CHANGE:
            found[rank] = speed
    return found
