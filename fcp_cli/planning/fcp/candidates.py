"""The one loop over everything that is tried for a step: named candidates, the quickest answer, one stop rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np

from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.problem import Assignment, Batch, Problem

CLOSE_ENOUGH: Final = 0.005
"""Gap to the proven bound above which optional candidates are tried."""


class Found(NamedTuple):
    """The quickest answer so far.

    Attributes:
        assignment: the answer; None: none yet.
        seconds: its predicted makespan; infinite if there is none.
        name: of the candidate that gave it.
    """

    assignment: Assignment | None = None
    seconds: float = np.inf
    name: str = ""

    def quicker(self, name: str, other: Assignment | None, batch: Batch, problem: Problem) -> Found:
        """Return another answer if there is one and it is quicker; on ties keep this one."""
        if other is None:
            return self
        seconds = makespan_seconds(other, batch, problem)
        return Found(other, seconds, name) if seconds < self.seconds else self


class Candidate(NamedTuple):
    """One way to plan a step.

    Attributes:
        name: in explanations.
        improve: takes the quickest answer so far, and returns it or a quicker one.
        above_gap: gap to the bound that the quickest answer must exceed for this to be tried; None: it is always tried.
    """

    name: str
    improve: Callable[[Found], Found]
    above_gap: float | None = None


def best_of(candidates: Iterable[Candidate], bound_seconds: Callable[[], float], found: Found) -> Found:
    """Return the quickest answer of the candidates, in their order.

    Args:
        candidates: made one at a time, as they are reached.
        bound_seconds: the proven lower bound of the step, asked for when the first optional candidate is reached.
        found: an answer that is known already.
    """
    bound: float | None = None
    for candidate in candidates:
        if candidate.above_gap is not None:
            bound = bound_seconds() if bound is None else bound
            if found.seconds <= bound * (1.0 + candidate.above_gap):
                continue
        found = candidate.improve(found)
    return found
