"""`fcp list`: the names of shipped models, clusters and other parts of fcp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from fcp_cli.command_line.command import takes
from fcp_cli.command_line.known_names import KINDS, Known, ignored_plugins, known_names, other_names
from fcp_cli.console import print_always, print_json
from fcp_cli.options import Arg, Opt


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOptions:
    """Kind of names to list."""

    kind: Annotated[Known | None, Arg("models, clusters, solvers, targets or integrations; without it, all.")] = None
    json: Annotated[bool, Opt("Print one JSON document on stdout.")] = False


@takes(ListOptions, "fcp list models", "fcp list")
def list_names(options: ListOptions) -> None:
    """List names that options take: models, clusters, solvers, targets.

    The frameworks that fcp hooks are also listed.
    """
    kinds = [kind for kind in KINDS if options.kind in (None, kind)]
    found = {str(kind): known_names(kind) for kind in kinds}
    for kind in kinds:
        for line in ignored_plugins(kind):
            print_always(f"ignored: {line}")
    if options.json:
        print_json(found)
        return
    for kind in kinds:
        if options.kind is None:
            typer.echo(f"{kind}:")
        aliases = other_names(kind)
        for name in found[kind]:
            shown = f"{name} ({', '.join(aliases[name])})" if aliases.get(name) else name
            typer.echo(shown if options.kind else f"  {shown}")
