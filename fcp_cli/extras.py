"""The libraries that only some commands need, and the line that installs them: by themselves, from any index."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires


def pip_install(extra: str, *only: str) -> str:
    """Return the command that installs the packages of an extra of fcp.

    Args:
        extra: its name in pyproject.toml.
        only: names of the packages that are missing; none: all.
    """
    found = [line for name, line in _of_extras().get(extra, {}).items() if not only or name in only]
    return "pip install " + " ".join(f"'{line}'" for line in found or [f"fcp-cli[{extra}]"])


def pip_install_module(module: str) -> str | None:
    """Return the command that installs a module that some extra asks for; None if none does."""
    name = {"vl_convert": "vl-convert-python", "PIL": "pillow"}.get(module, module.replace("_", "-"))
    extra = next((extra for extra, lines in _of_extras().items() if name in lines), None)
    return None if extra is None else pip_install(extra, name)


@cache
def _of_extras() -> dict[str, dict[str, str]]:
    """Return extra -> name of a package -> requirement, as the installed fcp records them."""
    found: dict[str, dict[str, str]] = {}
    try:
        lines = requires("fcp-cli") or []
    except PackageNotFoundError:  # fcp runs from a folder of sources
        lines = []
    for line in lines:
        requirement, _, condition = line.partition(";")
        if named := re.search(r"extra == ['\"]([\w-]+)['\"]", condition):
            name = re.match(r"[\w.-]+", requirement)
            assert name is not None, f"{line} names no package"
            found.setdefault(named[1], {})[name[0]] = requirement.strip()
    return found
