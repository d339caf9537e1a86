"""`fcp env`: the installed versions, as a block to paste into an issue."""

from __future__ import annotations

import sys
from typing import Annotated

from fcp_cli.cli.command import takes
from fcp_cli.util.console import note, print_json
from fcp_cli.util.options import Opt


@takes("fcp env", "fcp env --json")
def env(*, json: Annotated[bool, Opt("Print one JSON document on stdout.")] = False) -> None:
    """Show versions, devices and communication libraries, for an issue."""
    from fcp_cli.util.machine import collect_facts, facts_document, facts_lines

    facts = collect_facts()
    if json:
        print_json(facts_document(facts))
        return
    note("Copy and paste this block into your issue:\n")
    sys.stdout.write("".join(f"{line}\n" for line in facts_lines(facts)))
