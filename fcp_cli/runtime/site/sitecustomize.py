"""Prepare the ranks of a job under a plan, in every Python that starts with this folder on PYTHONPATH.

For jobs whose own shell script starts the ranks (`fcp launch --inject env`). Processes of such a job that are not ranks
are only kept from training, and Python without a plan is not affected. A sitecustomize of the site itself runs
afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path


def _prepare_rank() -> None:
    # Python ignores a failing sitecustomize, and the script would train without the plan: exit instead.
    try:
        from fcp_cli.errors import FcpError
        from fcp_cli.runtime.inject import install
        from fcp_cli.runtime.launcher import is_scheduler
    except ImportError as error:
        _end(f"fcp cannot be imported by {sys.executable}, which runs this rank ({error}); install fcp-cli there", 1)
    if is_scheduler(os.environ):
        os._exit(0)
    try:
        install(os.environ)
    except FcpError as error:
        _end(str(error), error.exit_status)


def _keep_from_training() -> None:
    # A Python without fcp runs the job script's helpers, not its training, and must not fail.
    with suppress(ImportError):
        from fcp_cli.runtime.inject import install_beside_ranks

        install_beside_ranks()


def _end(message: str, status: int) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(status)


def _run_site_own() -> None:
    """Run the next sitecustomize on the path, which this one shadows."""
    here = str(Path(__file__).resolve().parent)
    others = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("FCP_PLAN"):
    if "RANK" in os.environ or "MS_ROLE" in os.environ:
        _prepare_rank()
    else:
        _keep_from_training()
_run_site_own()
