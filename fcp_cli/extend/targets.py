"""Third-party launch targets: a `Target` has templates of a job's files, and the command that starts the job.

    [project.entry-points."fcp.targets"]
    pbs = "fcp_pbs:TARGET"

Templates are jinja2 with the variables of shipped targets. `variable("NAME")` refers to a shell variable on the node;
`quote` and `kubernetes_word` quote a word for the file.
"""

from fcp_cli.launching.job.job import Job
from fcp_cli.launching.job.shell import kubernetes_word, quote, variable
from fcp_cli.launching.targets.catalog import Target
from fcp_cli.launching.targets.values import NodeFacts

__all__ = ["Job", "NodeFacts", "Target", "kubernetes_word", "quote", "variable"]
