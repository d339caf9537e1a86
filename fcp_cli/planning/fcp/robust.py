"""`--robust`: among answers that are as quick by the cost model, the one that suffers least from effects that the model
ignores.

The candidates are fcp's own answer and its answers for machines on which rings, or those across nodes, are slower than
they are, or micro-batches are dearer; each of them also in reverse, where ranks do not wait for waves, and else with
rings across nodes kept apart. All are priced as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.compiled.core import Machine
from fcp_cli.planning.fcp.apart import spread_cross_node_rings
from fcp_cli.planning.fcp.solver import FcpSolver
from fcp_cli.planning.kernel_inputs import repriced
from fcp_cli.planning.problem import Assignment, Batch
from fcp_cli.planning.stress import stressed_seconds

MOST_LOSS: Final = 0.005
"""Of the predicted seconds: extra time that a robust step may take without disturbances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RobustSolver:
    """Chooses among the answers of one solver.

    Attributes:
        plain: the solver.
    """

    plain: FcpSolver
    name: str = "fcp"
    options: Mapping[str, Any] = field(default_factory=lambda: {"robust": True})

    def assign(self, batch: Batch) -> Assignment:
        """Plan one step; see `problem.Solver`."""
        problem = self.plain.problem
        found = [(makespan_seconds(answer, batch, problem), answer) for answer in self._candidates(batch)]
        most = min(seconds for seconds, _answer in found) * (1.0 + MOST_LOSS)
        near = [answer for seconds, answer in found if seconds <= most]
        if len(near) == 1:
            return near[0]
        return min(near, key=lambda answer: sum(stressed_seconds(answer, batch, problem).values()))

    def _candidates(self, batch: Batch) -> Iterator[Assignment]:
        problem = self.plain.problem
        for machine in _machines(self.plain.machine):
            answer = replace(self.plain, machine=machine).assign(batch)
            yield answer
            if problem.sync == "iteration":
                yield reversed_order(answer)
            else:
                yield spread_cross_node_rings(
                    answer, num_ranks=problem.num_ranks, ranks_per_node=problem.ranks_per_node
                )


def _machines(machine: Machine) -> Iterator[Machine]:
    yield machine
    prices = machine.prices
    yield repriced(machine, ring=prices.ring * (1.0, 2.0))
    yield repriced(machine, ring=1.2 * prices.ring, hop=1.2 * prices.hop)
    yield repriced(machine, beta=1.5 * prices.beta)


def reversed_order(answer: Assignment) -> Assignment:
    """Return the same micro-batches in reverse: no later by the cost model, since a schedule runs backwards as long."""
    rows = np.arange(len(answer.wave))[::-1]
    degrees, sizes = np.diff(answer.rank_offsets)[rows], np.diff(answer.member_offsets)[rows]
    ranks = [answer.ranks[answer.rank_offsets[i] : answer.rank_offsets[i + 1]] for i in rows]
    members = [answer.members[answer.member_offsets[i] : answer.member_offsets[i + 1]] for i in rows]
    return Assignment(
        wave=answer.wave[rows],
        rank_offsets=np.concatenate(([0], np.cumsum(degrees))),
        ranks=np.concatenate(ranks).astype(np.int32),
        member_offsets=np.concatenate(([0], np.cumsum(sizes))),
        members=np.concatenate(members),
    )
