"""Checks that hooked functions exist and take the expected arguments before an integration hooks them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from fcp_cli.errors import RunError


def require(module: ModuleType, path: str, parameters: Sequence[str], *, found: str, advice: str) -> None:
    """Raise RunError unless `path` (a name, or Class.method) is in the module and takes these parameters.

    Args:
        found: package of the module, with its version.
        advice: versions known to work.
    """
    target: Any = module
    for name in path.split("."):
        target = getattr(target, name, None)
    if target is None:
        raise RunError(f"{found} has no {module.__name__}.{path}; {advice}")
    taken = inspect.signature(target).parameters if parameters else {}  # properties have none
    for name in parameters:
        if name not in taken:
            raise RunError(f"{found}: {module.__name__}.{path} takes no {name}; {advice}")


def require_all(
    module: ModuleType,
    wanted: Iterable[tuple[str, Sequence[str]]],
    *,
    package: str,
    found: str,
    versions: Sequence[str],
) -> None:
    """Require each (path, parameters) of a module.

    Args:
        package: pip package.
        found: its name, with its version.
        versions: versions known to work, the newest last.
    """
    for path, parameters in wanted:
        require(module, path, parameters, found=found, advice=advice(package, versions))


def advice(package: str, versions: Sequence[str]) -> str:
    """Return the advice for an unsupported version of a package."""
    return f"versions known to work: {', '.join(versions)}; pip install {package}=={versions[-1]}"
