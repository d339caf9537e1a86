"""Third-party integrations: a `Hook` is called with a framework's module right after a rank imports it.

    [project.entry-points."fcp.integrations"]
    "my_framework.trainer" = "fcp_my_framework:hook"

The entry point's name is the module's name; the package is imported only after that module. A hook usually replaces the
training function with one that takes micro-batches from `fcp_cli.runtime.steps`. For transformers models it calls
`prepare(model)` first. If it cannot follow the plan, it raises `RunError`, and the job ends with that one-line message.
"""

from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.runtime.injection.integrations import Hook, transformers_models

__all__ = ["Hook", "RunError", "prepare"]


def prepare(model: Any) -> None:
    """Make a transformers model run its attention on the ring of the current micro-batch.

    Call it before wrapping the model (DDP, `fully_shard`).

    Raises:
        RunError: rings cannot compute this model exactly.
    """
    transformers_models().prepare(model)
