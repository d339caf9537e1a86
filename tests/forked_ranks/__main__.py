"""`python -m tests.forked_ranks MODULE ARGS` in a job's environment: the server of all jobs forks MODULE, as for fcp."""

from __future__ import annotations

import sys

from tests.forked_ranks.rank_forking import SHARED, go_on_forked

if __name__ == "__main__":
    go_on_forked(sys.argv[1:])
    sys.exit(f"{SHARED} names no server")
