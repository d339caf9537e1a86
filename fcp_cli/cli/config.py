"""The YAML config `fcp.yaml`: options per command, named like their flags, and which of them need the user's trust."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fcp_cli.errors import UsageError
from fcp_cli.util.options import Option
from fcp_cli.util.words import did_you_mean


class ConfigFile(NamedTuple):
    """Config file of this command line: named with --config, or found in the current folder."""

    path: Path
    is_named: bool


def read_config(path: Path, group: Any) -> dict[str, Any]:
    """Read a config file into click's default_map for the command group `group`."""
    # Imported here: PyYAML takes a tenth of the run time of `fcp --help`.
    from fcp_cli.util.inputs import parse_yaml, read_text

    text = read_text(path, error=UsageError, label="the config ")
    config = parse_yaml(text, name=str(path), error=UsageError)
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise UsageError(f"{path} must map commands to their options, for example 'plan: {{ranks: 64}}'")
    return _group_defaults(config, group, where=str(path))


def _group_defaults(config: dict[str, Any], group: Any, *, where: str, words: str = "") -> dict[str, Any]:
    defaults = {}
    for name, options in config.items():
        if name not in group.commands:
            hint = _of_commands(str(name), group) or did_you_mean(name, group.commands)
            raise UsageError(f"{where}: there is no command {name!r}{hint}")
        if not isinstance(options, dict):
            raise UsageError(f"{where}: the options of {name!r} must be a mapping, not {options!r}")
        defaults[name] = _command_defaults(options, group.commands[name], where=where, name=f"{words}{name}")
    return defaults


def _of_commands(name: str, group: Any) -> str:
    """Return a hint for an option written at top level instead of under its command, or ""."""
    flag = f"--{name.replace('_', '-')}"
    found = [verb for verb, command in group.commands.items() if any(flag in p.opts for p in command.params)]
    if not found:
        return ""
    example = "plan" if "plan" in found else found[0]
    return f"; {name} is an option of {', '.join(found)}: write '{example}: {{{name}: ...}}'"


def unknown_variables(environment: Iterable[str], group: Any, *, prefix: str = "FCP") -> Iterator[str]:
    """Yield a warning for each environment variable that has a command's prefix but matches no option of it."""
    names = list(environment)
    for verb, command in group.commands.items():
        known = set(_variables(command, f"{prefix}_{verb.upper()}"))
        for name in names:
            if name.startswith(f"{prefix}_{verb.upper()}_") and name not in known:
                yield f"the variable {name} sets nothing: {verb} has no such option{did_you_mean(name, known)}"


def _variables(command: Any, prefix: str) -> Iterator[str]:
    yield from (f"{prefix}_{parameter.name.upper()}" for parameter in command.params)
    for verb, inner in getattr(command, "commands", {}).items():
        yield from _variables(inner, f"{prefix}_{verb.upper()}")


def _command_defaults(options: dict[str, Any], command: Any, *, where: str, name: str) -> dict[str, Any]:
    """Return the defaults of one command; keys are long flags (`-` or `_`), or subcommands of a group."""
    subcommands = getattr(command, "commands", {})
    parameters = {flag.lstrip("-"): p for p in command.params for flag in p.opts if flag.startswith("--")}
    defaults: dict[str, Any] = {}
    for key, value in options.items():
        spelling = str(key).replace("_", "-")
        if key in subcommands:
            defaults |= _group_defaults({key: value}, command, where=where, words=f"{name} ")
        elif spelling in parameters:
            parameter = parameters[spelling]
            repeated = getattr(parameter, "multiple", False) or parameter.nargs == -1
            defaults[parameter.name] = [value] if repeated and isinstance(value, str) else value
        else:
            raise UsageError(f"{where}: {name!r} has no option {key!r}{did_you_mean(spelling, parameters)}")
    return defaults


def refuse_untrusted(path: Path, options: Iterable[Option], values: Mapping[str, Any], verb: str) -> None:
    """Raise UsageError if a config file that the user did not name sets options that need trust.

    A file found in the current folder may not be the user's own: it may not run code or commands, or write elsewhere.

    Args:
        path: the config file.
        options: options that it sets for this command.
        values: option values of the command, by name.
        verb: config key of the command, e.g. "launch".
    """
    asking = [option for option in options if _needs_trust(option, values[option.name], path.parent)]
    if asking:
        names = ", ".join(f"{verb}.{option.flag.removeprefix('--')}" for option in asking)
        reason = "run commands" if any(_trust(option) == "runs" for option in asking) else "write outside of its folder"
        raise UsageError(
            f"{path} was found in this folder and sets {names}, which may {reason}; read it, then name it with "
            f"'--config {path}'"
        )


def _needs_trust(option: Option, value: Any, folder: Path) -> bool:
    if _trust(option) == "writes" and value is not None and str(value) != "-":
        return not (folder / value).resolve().is_relative_to(folder.resolve())
    return _trust(option) == "runs" and bool(value)


def _trust(option: Option) -> str | None:
    return getattr(option.mark, "trust", None)
