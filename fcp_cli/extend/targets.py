"""Launch targets of other packages: a `Target` has the templates of a job's files, and the command that starts it.

    [project.entry-points."fcp.targets"]
    pbs = "fcp_pbs:TARGET"

Templates are jinja2 with the variables of the shipped ones. `variable("NAME")` is a variable of the node's own shell,
and `quote` or `kubernetes_word` quotes a word for the file.
"""

from fcp_cli.launching.job.job import Job
from fcp_cli.launching.job.shell import kubernetes_word, quote, variable
from fcp_cli.launching.targets.catalog import Target
from fcp_cli.launching.targets.values import NodeFacts

__all__ = ["Job", "NodeFacts", "Target", "kubernetes_word", "quote", "variable"]
