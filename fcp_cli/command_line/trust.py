"""Trust check for an `fcp.yaml` found in the current folder, which may not be the user's own.

Settings that run code or commands, or write outside the folder, apply only if the user names the file with --config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fcp_cli.errors import UsageError
from fcp_cli.options import Option


def refuse_untrusted(path: Path, options: Iterable[Option], values: Mapping[str, Any], verb: str) -> None:
    """Raise UsageError if a config file that the user did not name sets options that need trust.

    Args:
        path: the config file.
        options: options that it sets for this command.
        values: option values of the command, by name.
        verb: config key of the command, e.g. "launch".
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
