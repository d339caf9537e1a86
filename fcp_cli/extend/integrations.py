"""Integrations of other packages: a `Hook` is called with a framework's module right after a rank has imported it.

    [project.entry-points."fcp.integrations"]
    "my_framework.trainer" = "fcp_my_framework:hook"

The entry point has the name of the module; its package is not imported before that module is. A hook usually replaces
the function that trains by one that takes its micro-batches from `fcp_cli.runtime.steps`.
"""

from fcp_cli.runtime.injection.integrations import Hook

__all__ = ["Hook"]
