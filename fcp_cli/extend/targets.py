"""Launch targets of other packages: a `Target` says which templates make a job's files, and what starts the job.

    [project.entry-points."fcp.targets"]
    pbs = "fcp_pbs:TARGET"

Templates are jinja2 with the variables of the shipped ones; `variable("NAME")` stands for a variable that the node's
own shell knows, and `quote` or `kubernetes_word` makes a word ready for the file.
"""

from fcp_cli.launching.job.job import Job
from fcp_cli.launching.job.shell import kubernetes_word, quote, variable
from fcp_cli.launching.targets.catalog import Target
from fcp_cli.launching.targets.values import NodeFacts

__all__ = ["Job", "NodeFacts", "Target", "kubernetes_word", "quote", "variable"]
