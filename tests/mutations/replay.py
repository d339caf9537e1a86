"""What `fcp verify` says of plans with every kind of group, with members as threads; run with a changed package."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from fcp_cli.verification import emulation
from fcp_cli.verification import verify as verifying
from tests.runtime.plans import Row, write_plan

ITERATION = (
    Row([0, 1, 2], [61, 5]),
    Row([3, 4], [33]),
    Row([0, 1, 2, 3], [50, 3], heads_degree=2),
    Row([4, 5], [17], heads_degree=2),
    Row([0, 1, 2, 3, 4], [83]),
    Row([0, 1, 2, 3], [59]),
)
WAVES = (
    Row([0, 1, 2], [41], wave=0),
    *(Row([rank], wave=0) for rank in (3, 4, 5)),
    Row([0], [9], wave=1),
    Row([2, 3, 4, 5], [70, 2], wave=1),
    Row([1], wave=1),
)


def main() -> None:
    """Print one line if a plan does not pass, and exit with status 1."""
    verifying.MOST_PROCESSES = 0  # threads
    emulation._RECEIVE_TIMEOUT_SECONDS = 20.0
    with TemporaryDirectory() as folder:
        for name, rows in {"iteration": ITERATION, "microbatch": WAVES}.items():
            plan = write_plan(Path(folder) / name, [rows], num_ranks=6, sync=name)  # type: ignore[arg-type]
            found = verifying.verify(plan)
            if not found.passed:
                step = found.steps[0]
                difference = max(step.loss_difference, step.gradient_difference)
                sys.exit(f"{name}: {found.order_fault or f'gradients or loss differ by {difference:.1e}'}")


if __name__ == "__main__":
    main()
