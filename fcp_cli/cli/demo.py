"""`fcp demo`: a plan, its gain in wall time, and the proof that training stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fcp_cli.cli.command import takes
from fcp_cli.util.console import human, print_json, results
from fcp_cli.util.options import Opt


@takes("fcp demo", "fcp demo -o /tmp/fcp-demo")
def demo(
    *,
    output: Annotated[
        Path, Opt("Output folder; that of an earlier demo is replaced.", flags=("--output", "-o"), trust="writes")
    ] = Path("fcp-demo"),
    json: Annotated[bool, Opt("Print its figures as one JSON document on stdout.")] = False,
) -> None:
    """Show fcp's gain in wall time, and exact gradients, in a few minutes.

    It needs no data and no GPU: texts are Python's own sources, and ranks are processes of this machine. Without
    PyTorch it only shows the plans. Exit status 1 if a gradient differs from one process by more than 1e-12.
    """
    from fcp_cli.cli.demo_show import Demo

    shown = Demo(folder=output, console=human() if json else results())
    shown.show()
    if json:
        print_json(shown.figures)
    if not shown.passed:
        raise typer.Exit(1)
