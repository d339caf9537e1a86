"""Plan and launch Flexible Context Parallelism.

`from fcp_cli import Planner` plans global batches in a program; `fcp_cli.runtime` runs inside a training job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcp_cli.planning.planner import Planner

__all__ = ["Planner", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the planner on first use: every command imports this package."""
    if name == "Planner":
        from fcp_cli.planning.planner import Planner

        return Planner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
