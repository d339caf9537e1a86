"""The YAML config: options per command, spelt like the flags, checked against the commands that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fcp_cli.errors import UsageError
from fcp_cli.words import did_you_mean


def read_config(path: Path, group: Any) -> dict[str, Any]:
    """Read a config file into click's default_map for the command group `group`.

    Raises:
        UsageError: unreadable, not YAML, or it names a command or an option that does not exist.
    """
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise UsageError(f"{path} must map commands to their options, for example 'plan: {{ranks: 64}}'")
    return _group_defaults(config, group, where=str(path))


def _group_defaults(config: dict[str, Any], group: Any, *, where: str) -> dict[str, Any]:
    defaults = {}
    for name, options in config.items():
        if name not in group.commands:
            raise UsageError(f"{where}: there is no command {name!r}{did_you_mean(name, group.commands)}")
        if not isinstance(options, dict):
            raise UsageError(f"{where}: the options of {name!r} must be a mapping, not {options!r}")
        defaults[name] = _command_defaults(options, group.commands[name], where=where, name=name)
    return defaults


def _command_defaults(options: dict[str, Any], command: Any, *, where: str, name: str) -> dict[str, Any]:
    """Read the options of one command; keys are spelt like long flags, and name the subcommands of a group, too."""
    subcommands = getattr(command, "commands", {})
    parameters = {flag.lstrip("-"): p for p in command.params for flag in p.opts if flag.startswith("--")}
    defaults: dict[str, Any] = {}
    for key, value in options.items():
        spelling = str(key).replace("_", "-")
        if key in subcommands:
            defaults |= _group_defaults({key: value}, command, where=where)
        elif spelling in parameters:
            parameter = parameters[spelling]
            repeated = getattr(parameter, "multiple", False) or parameter.nargs == -1
            defaults[parameter.name] = [value] if repeated and isinstance(value, str) else value
        else:
            raise UsageError(f"{where}: {name!r} has no option {key!r}{did_you_mean(spelling, parameters)}")
    return defaults
