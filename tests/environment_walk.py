"""Runs many `fcp` commands in one environment of `tests.environments`, each in a fork of one process.

    python -m tests.environment_walk ENVIRONMENT < commands.json > outcomes.json

A fork has imported fcp, so a command costs what it does and no start of Python.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.environments import ENVIRONMENTS, enter

_MOST_SECONDS = 120


def outcome(words: Sequence[str]) -> dict[str, Any]:
    """Return the status and the standard error of one command."""
    with tempfile.TemporaryFile() as said:
        process = os.fork()
        if process == 0:
            run(words, said.fileno())
        _, status = os.waitpid(process, 0)
        said.seek(0)
        return {
            "words": list(words),
            "status": os.waitstatus_to_exitcode(status),
            "said": said.read().decode(errors="replace"),
        }


def run(words: Sequence[str], said: int) -> None:
    """Become `fcp` with these words; never returns."""
    from fcp_cli.cli.app import main

    signal.alarm(_MOST_SECONDS)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.dup2(said, 2)
    if {"--install-completion", "--show-completion"}.intersection(words):
        _pretend_a_shell()
    sys.argv = ["fcp", *words]
    status = 1
    try:
        main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _pretend_a_shell() -> None:
    """Have completion installed for bash in this folder: whoever tests has a home and perhaps no shell above it."""
    import shellingham  # type: ignore[import-untyped]  # a dependency of typer

    os.environ["HOME"] = str(Path.cwd())
    shellingham.detect_shell = lambda *_: ("bash", "/bin/bash")


if __name__ == "__main__":
    enter(ENVIRONMENTS[sys.argv[1]])
    import fcp_cli.cli.app
    import fcp_cli.planning.fcp_solver  # noqa: F401  # with its compiled functions

    json.dump([outcome(words) for words in json.load(sys.stdin)], sys.stdout)
