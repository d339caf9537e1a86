"""Trust in an `fcp.yaml` that stands in the current folder: the folder's author wrote it, not always the user.

Settings that become code or commands, or write elsewhere, are taken from it only if the user names the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fcp_cli.errors import UsageError
from fcp_cli.options import Option


def refuse_untrusted(path: Path, options: Iterable[Option], values: Mapping[str, Any], verb: str) -> None:
    """Refuse settings that need trust, of a config file that was found and not named.

    Args:
        path: the file.
        options: those that it sets for this command.
        values: the values of the command's options.
        verb: the command, as "launch".
    """
    asking = [option for option in options if _needs_trust(option, values[option.name], path.parent)]
    if asking:
        names = ", ".join(f"{verb}.{option.flag.removeprefix('--')}" for option in asking)
        reason = "run commands" if any(_mark(option) == "runs" for option in asking) else "write outside of its folder"
        raise UsageError(
            f"{path} was found in this folder and sets {names}, which may {reason}; read it, then name it with "
            f"'--config {path}'"
        )


def _needs_trust(option: Option, value: Any, folder: Path) -> bool:
    if _mark(option) == "writes" and value is not None and str(value) != "-":
        return not (folder / value).resolve().is_relative_to(folder.resolve())
    return _mark(option) == "runs" and bool(value)


def _mark(option: Option) -> str | None:
    return getattr(option.mark, "trust", None)
