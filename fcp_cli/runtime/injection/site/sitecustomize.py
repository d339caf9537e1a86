"""Prepare the ranks of a job under a plan, in every Python that starts with this folder on PYTHONPATH.

For jobs whose own shell script starts the ranks (`fcp launch --inject env`). A process of such a job that is no rank is
only kept from training, and one without a plan is not touched. A sitecustomize of the site itself is run too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path


def _prepare_rank() -> None:
    # Python continues without a sitecustomize that fails, and the script would train without the plan: so end here.
    try:
        from fcp_cli.errors import FcpError
        from fcp_cli.runtime.injection.install import install
        from fcp_cli.runtime.injection.ranks import is_scheduler
    except ImportError as error:
        _end(f"fcp cannot be imported by {sys.executable}, which runs this rank ({error}); install fcp-cli there", 1)
    if is_scheduler(os.environ):
        os._exit(0)
    try:
        install(os.environ)
    except FcpError as error:
        _end(str(error), error.exit_status)


def _keep_from_training() -> None:
    # A Python without fcp runs helpers of the job's script, not its training, which would fail without ranks.
    with suppress(ImportError):
        from fcp_cli.runtime.injection.install import install_beside_ranks

        install_beside_ranks()


def _end(message: str, status: int) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(status)


def _run_site_own() -> None:
    """Run the next sitecustomize on the path, which this one hides."""
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
