"""Output of `fcp launch --explain`: each variable of the job, why it is set, and the source of its value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fcp_cli.launching.job.job import (
    METRICS_VARIABLE,
    MODEL_VARIABLE,
    ONLINE_VARIABLE,
    PLAN_VARIABLE,
    RUN_DIR_VARIABLE,
    Job,
    Variable,
)

if TYPE_CHECKING:
    from rich.table import Table

_FULL_WIDTH: Final = 80  # columns needed for the full table
# fcp's own variables -> (reason, source).
_OWN = {
    PLAN_VARIABLE: ("the plan that all ranks follow", "--plan, or the folder"),
    METRICS_VARIABLE: ("where rank 0 writes its measurements", "the run directory"),
    RUN_DIR_VARIABLE: ("where everything of the run goes", "--run-dir, or a new one"),
    ONLINE_VARIABLE: ("the planning settings of your script's stream", "--online"),
    MODEL_VARIABLE: ("the model, for your script", "--model"),
}


def explained(job: Job) -> tuple[Variable, ...]:
    """Return all variables of the job: fcp's own, then those of the device kind."""
    environment = job.job_environment()
    own = [
        Variable(name=name, value=environment[name], reason=reason, source=source)
        for name, (reason, source) in _OWN.items()
        if name in environment
    ]
    return (*own, *job.variables)


def explanation_document(job: Job) -> dict[str, Any]:
    """Return the variables as JSON values, for `--json`."""
    return {
        "stack": job.stack,
        "variables": [
            {
                "name": variable.name,
                "value": variable.value,
                "reason": variable.reason,
                "source": variable.source,
                "set_by_fcp": not variable.is_given,
            }
            for variable in explained(job)
        ],
    }


def explanation_table(job: Job, width: int) -> Table:
    """Return a table of a job's variables: name and value, reason, and source.

    Args:
        job: job to explain.
        width: terminal width in columns; below 80, sources are omitted.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("variable", width=31, overflow="fold")
    table.add_column("why", width=22 if width >= _FULL_WIDTH else None)
    if width >= _FULL_WIDTH:
        table.add_column("value from", width=23)
    for variable in explained(job):
        value = variable.value or "(found on the node)"
        cells = (f"{variable.name}\n{escape(value)}", escape(variable.reason), escape(variable.source))
        table.add_row(*cells[: len(table.columns)])
    return table
