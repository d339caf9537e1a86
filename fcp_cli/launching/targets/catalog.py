"""The targets of `fcp launch`: which files each is made of, and how a node learns its number there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.errors import UsageError
from fcp_cli.launching.job import shell
from fcp_cli.launching.job.job import Job
from fcp_cli.launching.job.shell import variable
from fcp_cli.launching.targets.templates import render, shipped_template
from fcp_cli.launching.targets.values import NodeFacts, template_values

HOSTFILE = "hostfile"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a job runs that this machine only describes.

    Attributes:
        template: of the file that starts a node's ranks, without suffix; `--template` replaces it.
        others: further files, rendered by shipped templates of the same values.
        node: how a node learns its number and the first node's address.
        ready: makes a word ready for the template; see `template_values`.
        start: what is typed to start the job, given the folder of its files.
    """

    template: str
    others: tuple[str, ...] = ()
    node: Callable[[Job], NodeFacts]
    ready: Callable[[str], str] = shell.quote
    start: Callable[[Path], tuple[str, ...]]


def _on_kubernetes(template: str, *, rank: str, first_node: str) -> Target:
    """Return a target whose one file an operator of Kubernetes takes.

    Args:
        template: of the file.
        rank: the variable that holds a node's number.
        first_node: its address, where {name} stands for the job's name.
    """

    def node(job: Job) -> NodeFacts:
        assert job.cluster is not None
        name = job.cluster.name
        log_name = f"{name}-node{variable(rank)}"
        return NodeFacts(rank=variable(rank), master_addr=first_node.format(name=name), log_name=log_name)

    return Target(
        template=template,
        node=node,
        ready=shell.kubernetes_word,
        start=lambda folder: ("kubectl", "apply", "-f", str(folder / template)),
    )


TARGETS = {
    "scripts": Target(
        template="node.sh",
        others=("start.sh", HOSTFILE),
        node=lambda job: NodeFacts(
            rank=variable("NODE_RANK"),
            master_addr=variable("MASTER_ADDR"),
            log_name=f"{variable('STARTED')}-node{variable('NODE_RANK')}",
        ),
        start=lambda folder: ("bash", str(folder / "start.sh")),
    ),
    "slurm": Target(
        template="job.sbatch",
        node=lambda job: NodeFacts(
            rank=variable("SLURM_NODEID"),
            master_addr=variable("MASTER_ADDR"),
            log_name=f"{variable('STARTED')}-node{variable('SLURM_NODEID')}",
        ),
        start=lambda folder: ("sbatch", str(folder / "job.sbatch")),
    ),
    # A TrainJob's JobSet has the TrainJob's name.
    "trainjob": _on_kubernetes("trainjob.yaml", rank="JOB_COMPLETION_INDEX", first_node="{name}-node-0-0.{name}"),
    "pytorchjob": _on_kubernetes("pytorchjob.yaml", rank="RANK", first_node=variable("MASTER_ADDR")),
    # JobSet gives every pod a name: set-job-number-index.set
    "jobset": _on_kubernetes("jobset.yaml", rank="JOB_COMPLETION_INDEX", first_node="{name}-node-0-0.{name}"),
    # The svc plugin gives every pod this name: job-task-index.job
    "volcano": _on_kubernetes("volcano.yaml", rank="VC_TASK_INDEX", first_node="{name}-node-0.{name}"),
}


def job_files(target: Target, job: Job, *, template: Path | None = None) -> dict[str, str]:
    """Return name and text of a job's files, the one that starts a node's ranks first. Nothing is written.

    Args:
        target: one of `TARGETS`.
        job: what is launched.
        template: a site's own, instead of the target's.

    Raises:
        UsageError: a template has a mistake, or a word cannot be written in UTF-8.
    """
    values = template_values(job, target.node(job), target.ready)
    own = template or shipped_template(target.template)
    rendered = [(target.template, own), *((name, shipped_template(name)) for name in target.others)]
    files = {name: render(path, values) for name, path in rendered}
    for name, text in files.items():
        # Bytes of an argument or a path that are no UTF-8 stand in a text as lone surrogates.
        if lone := re.search("[\ud800-\udfff]+", text):
            raise UsageError(f"{name} cannot hold {lone[0]!a}: an argument or a path is not UTF-8 text")
    return files
