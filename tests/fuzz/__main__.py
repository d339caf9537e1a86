"""`make fuzz`: so many inputs over all kinds, one process a kind, ended where an input takes too long; prints what it finds.

python -m tests.fuzz 10000 [FIRST] [KIND ...]
"""

from __future__ import annotations

import json
import re
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from tests.fuzz.campaign import KINDS, MOST_SECONDS

_START_SECONDS = 120.0  # imports, and the sound files; on a busy machine


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kinds = sys.argv[3:] or list(KINDS)
    each = -(-count // len(kinds))
    seen: Counter[str] = Counter()
    for kind in kinds:
        findings = list(_findings(kind, first, each))
        print(f"{kind}: {each} inputs, {len(findings)} findings", flush=True)
        for number, wrong in findings:
            place = re.sub(r"^fcp [^:]*: ", "", re.sub(r"\d+", "N", wrong))[:160]
            seen[place] += 1
            if seen[place] == 1:
                print(f"  {number}: {wrong}", flush=True)
    print(f"{each * len(kinds)} inputs, {sum(seen.values())} findings of {len(seen)} kinds")
    sys.exit(1 if seen else 0)


def _findings(kind: str, first: int, count: int) -> Iterator[tuple[int, str]]:
    """Yield what a kind's inputs show; where an input ends the process, or must be ended, the next one goes on."""
    end = first + count
    while first < end:
        command = [sys.executable, "-m", "tests.fuzz.campaign", kind, str(first), str(end - first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            at, patience = first - 1, _START_SECONDS
            with selectors.DefaultSelector() as ready:
                ready.register(process.stdout, selectors.EVENT_READ)
                while ready.select(patience) and (line := process.stdout.readline()):
                    at, wrong = json.loads(line)
                    patience = 2 * MOST_SECONDS
                    if wrong is not None:
                        yield at, wrong
            hangs = process.poll() is None and at < end - 1
            process.kill()
        if at >= end - 1 and not hangs:
            return
        if at < first:
            raise SystemExit(f"{kind}: the process did not begin")
        yield at, "it does not end" if hangs else f"the process ended with status {process.returncode}"
        first = at + 1


if __name__ == "__main__":
    main()
