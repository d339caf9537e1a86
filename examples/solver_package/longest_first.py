"""`longest-first`: each sequence, by falling length, on the fewest ranks that hold it, in the first wave with room."""

import numpy as np

from fcp_cli.extend import Assignment, Batch, GlobalBatches, Problem, Solver, packs_of, place_waves, work_on


def make_solver(batches: GlobalBatches) -> Solver:
    """Make the solver of a plan."""
    return LongestFirst(batches.problem)


class LongestFirst:
    """Keeps no state between steps, so that the same batch always gives the same answer."""

    name = "longest-first"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.options: dict[str, object] = {}

    def assign(self, batch: Batch) -> Assignment:
        """Return the step's waves of (degree, positions in the batch)."""
        degrees = self._fewest_ranks(batch)
        longer = [(int(degrees[i]), [int(i)]) for i in np.argsort(-degrees, kind="stable") if degrees[i] > 1]
        shorter = np.flatnonzero(degrees == 1).tolist()
        waves: list[list[tuple[int, list[int]]]] = []
        for degree, members in [*longer, *((1, pack) for pack in packs_of(shorter, batch, self.problem))]:
            taken = (sum(width for width, _ in wave) for wave in waves)
            room = next((k for k, ranks in enumerate(taken) if ranks + degree <= self.problem.num_ranks), None)
            if room is None:
                waves.append([(degree, members)])
            else:
                waves[room].append((degree, members))
        return place_waves(waves, self.problem)

    def _fewest_ranks(self, batch: Batch) -> np.ndarray:
        """[sequences] the smallest degree whose ranks hold each, with the padding of that degree."""
        choices = np.arange(1, self.problem.num_ranks + 1)[:, None]
        held = work_on(batch.work, choices, self.problem).tokens <= choices * self.problem.tokens_per_rank
        return np.asarray(np.argmax(held, axis=0) + 1)
