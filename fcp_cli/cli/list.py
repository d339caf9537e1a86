"""`fcp list`: the names of shipped models, clusters and other parts of fcp."""

from __future__ import annotations

from typing import Annotated

import typer

from fcp_cli.cli.command import KINDS, Known, ignored_plugins, known_names, other_names, packages_of, takes
from fcp_cli.util.console import print_always, print_json
from fcp_cli.util.options import Arg, Opt


@takes("fcp list models", "fcp list")
def list_names(
    *,
    kind: Annotated[Known | None, Arg("models, clusters, solvers, targets or integrations; without it, all.")] = None,
    json: Annotated[bool, Opt("Print one JSON document on stdout.")] = False,
) -> None:
    """List names that options take: models, clusters, solvers, targets.

    The frameworks that fcp hooks are also listed, and what other installed packages add.
    """
    kinds = KINDS if kind is None else (kind,)
    found = {str(one): known_names(one) for one in kinds}
    for one in kinds:
        for line in ignored_plugins(one):
            print_always(f"ignored: {line}")
    if json:
        print_json(found)
        return
    for one in kinds:
        if kind is None:
            typer.echo(f"{one}:")
        remarks = {name: ", ".join(aliases) for name, aliases in other_names(one).items() if aliases}
        remarks |= {name: f"of the package {package}" for name, package in packages_of(one).items()}
        for name in found[one]:
            shown = f"{name} ({remarks[name]})" if name in remarks else name
            typer.echo(shown if kind else f"  {shown}")
