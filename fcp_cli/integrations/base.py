"""Tables by which integrations refuse: signatures of a framework's hooked functions, and unsupported settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from fcp_cli.errors import RunError

Signatures: TypeAlias = Mapping[str, Sequence[str]]
"""A name of a module, or Class.method -> parameters passed to it by name."""
Refusals: TypeAlias = Iterable[tuple[bool, str]]
"""Conditions under which a plan cannot be followed, each with the sentence that says why and what to change."""


def refuse(*tables: Refusals) -> None:
    """Raise RunError with the sentence of the first condition that holds."""
    for table in tables:
        for is_refused, sentence in table:
            if is_refused:
                raise RunError(sentence)


def require(module: ModuleType, wanted: Signatures, *, found: str, advice: str) -> None:
    """Raise RunError unless a module has these names, and they take these parameters.

    Args:
        found: package of the module, with its version.
        advice: versions known to work.
    """
    for path, parameters in wanted.items():
        target: Any = module
        for name in path.split("."):
            target = getattr(target, name, None)
        if target is None:
            raise RunError(f"{found} has no {module.__name__}.{path}; {advice}")
        taken = inspect.signature(target).parameters if parameters else {}  # properties have none
        for name in parameters:
            if name not in taken:
                raise RunError(f"{found}: {module.__name__}.{path} takes no {name}; {advice}")


def advice(package: str, versions: Sequence[str]) -> str:
    """Return the advice for an unsupported version of a package; `versions` are known to work, the newest last."""
    return f"versions known to work: {', '.join(versions)}; pip install {package}=={versions[-1]}"
