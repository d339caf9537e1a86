"""Optional dependencies, and the commands that install them individually, from any index."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires


def pip_install(extra: str, *only: str) -> str:
    """Return the pip command that installs an extra of fcp.

    Args:
        extra: name in pyproject.toml.
        only: packages to install; by default all of the extra.
    """
    found = [line for name, line in _of_extras().get(extra, {}).items() if not only or name in only]
    return "pip install " + " ".join(f"'{line}'" for line in found or [f"fcp-cli[{extra}]"])


def pip_install_module(module: str) -> str | None:
    """Return the pip command for a module that belongs to an extra, or None."""
    name = {"vl_convert": "vl-convert-python", "PIL": "pillow"}.get(module, module.replace("_", "-"))
    extra = next((extra for extra, lines in _of_extras().items() if name in lines), None)
    return None if extra is None else pip_install(extra, name)


@cache
def _of_extras() -> dict[str, dict[str, str]]:
    """Return {extra: {package: requirement}} from the metadata of the installed fcp."""
    found: dict[str, dict[str, str]] = {}
    try:
        lines = requires("fcp-cli") or []
    except PackageNotFoundError:  # fcp runs from a source folder
        lines = []
    for line in lines:
        requirement, _, condition = line.partition(";")
        if named := re.search(r"extra == ['\"]([\w-]+)['\"]", condition):
            name = re.match(r"[\w.-]+", requirement)
            assert name is not None, f"{line} names no package"
            found.setdefault(named[1], {})[name[0]] = requirement.strip()
    return found
