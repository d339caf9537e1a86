"""What `--dry-run` and `--explain` print instead of starting anything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fcp_cli.console import note, print_json
from fcp_cli.words import counted

if TYPE_CHECKING:
    from fcp_cli.launching.job.job import Job


def print_commands(job: Job, *, json: bool) -> None:
    """The result of --dry-run goes to stdout, so that it can be piped into a file or a shell."""
    from fcp_cli.launching.job.document import launch_document
    from fcp_cli.launching.job.job import ADDRESS_TO_FILL_IN

    if job.num_nodes > 1:
        processes = counted(job.processes_per_node, "process")
        note(f"one command per node, {processes} each; all nodes must see {job.run_dir}")
        if job.master_addr == ADDRESS_TO_FILL_IN:
            note(f"put the address of node 0 for {ADDRESS_TO_FILL_IN}, or give it with --master-addr")
    document = launch_document(job)
    if json:
        print_json(document)
        return
    for command in document["commands"]:
        if job.num_nodes > 1:
            sys.stdout.write(f"# node {command['node']}\n")
        sys.stdout.write(command["shell"] + "\n")


def print_explanation(job: Job, *, json: bool) -> None:
    """Goes to stdout like the commands of --dry-run, and is as wide in a pipe as on a terminal."""
    from rich.console import Console

    from fcp_cli.launching.job.explain import explanation_document, explanation_table

    if json:
        print_json(explanation_document(job))
    else:
        Console(highlight=False).print(explanation_table(job))
