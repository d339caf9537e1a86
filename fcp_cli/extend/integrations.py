"""Integrations of other packages: a `Hook` is called with a framework's module right after a rank has imported it.

    [project.entry-points."fcp.integrations"]
    "my_framework.trainer" = "fcp_my_framework:hook"

The entry point has the name of the module; its package is not imported before that module is. A hook usually replaces
the function that trains by one that takes its micro-batches from `fcp_cli.runtime.steps`. If its models are those of
transformers, it calls `prepare(model)` first. It raises `RunError` if it cannot follow the plan: the job then ends with
that one line.
"""

from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.runtime.injection.integrations import Hook, transformers_models

__all__ = ["Hook", "RunError", "prepare"]


def prepare(model: Any) -> None:
    """Run the attention of a model of transformers on the ring of the current micro-batch.

    Call it before the model is wrapped (DDP, `fully_shard`).

    Raises:
        RunError: rings cannot compute this model exactly.
    """
    transformers_models().prepare(model)
