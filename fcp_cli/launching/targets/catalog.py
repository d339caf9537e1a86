"""Targets of `fcp launch`: their files, and how a node learns its rank.

Third-party packages add targets as entry points in the group `fcp.targets` that load a `Target`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.errors import FcpError, UsageError
from fcp_cli.launching.job import shell
from fcp_cli.launching.job.job import Job
from fcp_cli.launching.job.shell import variable
from fcp_cli.launching.request import LOCAL
from fcp_cli.launching.targets.templates import SUFFIX, render, shipped_template
from fcp_cli.launching.targets.values import NodeFacts, template_values
from fcp_cli.plugins import Registry

HOSTFILE = "hostfile"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A scheduler or platform for which fcp writes job files.

    Attributes:
        template: template of the file that starts a node's ranks, without suffix; `--template` replaces it.
        others: further files, rendered with the same values.
        folder: folder of the templates NAME.j2; None: the shipped ones.
        options: fields of `ClusterOptions` that it supports, besides `template`, `python` and `env`.
        is_container: whether ranks run in a container, which requires `image`.
        node: returns how a node of a job learns its rank and node 0's address.
        ready: quotes a word for the template; see `template_values`.
        start: returns the command that starts the job, given the folder of its files.
    """

    template: str
    others: tuple[str, ...] = ()
    folder: Path | None = None
    options: frozenset[str] = frozenset()
    is_container: bool = False
    node: Callable[[Job], NodeFacts]
    ready: Callable[[str], str] = shell.quote
    start: Callable[[Path], tuple[str, ...]]


_OF_CONTAINERS = frozenset(
    {"image", "mount", "namespace", "request", "node_selector", "toleration", "env_secret", "pull_secret"}
    | {"rdma_resource", "host_network", "shm_size", "job_name"}
)


def _node(rank: str, first_node: str, *, log: str = "{name}") -> Callable[[Job], NodeFacts]:
    """Return a function for `Target.node`: rank from the variable `rank`, and node 0's address.

    {name} in the address and the log name is replaced by the job's name.
    """

    def node(job: Job) -> NodeFacts:
        assert job.cluster is not None
        name, number = job.cluster.name, variable(rank)
        log_name = f"{log.format(name=name)}-node{number}"
        return NodeFacts(rank=number, master_addr=first_node.format(name=name), log_name=log_name)

    return node


def _on_kubernetes(template: str, *, rank: str, first_node: str) -> Target:
    """Return a target with a single file for a Kubernetes operator.

    Args:
        template: template of the file.
        rank: variable with the node rank.
        first_node: node 0's address; {name} is replaced by the job's name.
    """
    return Target(
        template=template,
        options=_OF_CONTAINERS,
        is_container=True,
        node=_node(rank, first_node),
        ready=shell.kubernetes_word,
        start=lambda folder: ("kubectl", "apply", "-f", str(folder / template)),
    )


TARGETS = {
    "scripts": Target(
        template="node.sh",
        others=("start.sh", HOSTFILE),
        options=frozenset({"hostfile", "setup"}),
        node=_node("NODE_RANK", variable("MASTER_ADDR"), log=variable("STARTED")),
        start=lambda folder: ("bash", str(folder / "start.sh")),
    ),
    "slurm": Target(
        template="job.sbatch",
        options=frozenset({"sbatch_option", "srun_option", "setup", "job_name"}),
        node=_node("SLURM_NODEID", variable("MASTER_ADDR"), log=variable("STARTED")),
        start=lambda folder: ("sbatch", str(folder / "job.sbatch")),
    ),
    # A TrainJob's JobSet has the TrainJob's name.
    "trainjob": _on_kubernetes("trainjob.yaml", rank="JOB_COMPLETION_INDEX", first_node="{name}-node-0-0.{name}"),
    "pytorchjob": _on_kubernetes("pytorchjob.yaml", rank="RANK", first_node=variable("MASTER_ADDR")),
    "skypilot": Target(
        template="skypilot.yaml",
        options=frozenset({"image", "accelerator", "setup", "job_name"}),
        node=_node("SKYPILOT_NODE_RANK", variable("MASTER_ADDR")),
        start=lambda folder: ("sky", "launch", str(folder / "skypilot.yaml")),
    ),
    "dstack": Target(
        template="dstack.yaml",
        options=frozenset({"image", "accelerator", "setup", "job_name"}),
        is_container=True,
        node=_node("DSTACK_NODE_RANK", variable("DSTACK_MASTER_NODE_IP")),
        start=lambda folder: ("dstack", "apply", "-f", str(folder / "dstack.yaml")),
    ),
    "ray": Target(
        template="ray_job.py",
        options=frozenset({"job_name"}),
        node=_node("NODE_RANK", variable("MASTER_ADDR")),
        ready=shell.kubernetes_word,  # the script replaces $(NAME) like Kubernetes
        start=lambda folder: ("ray", "job", "submit", "--", "python", str(folder / "ray_job.py")),
    ),
    # JobSet gives every pod a name: set-job-number-index.set
    "jobset": _on_kubernetes("jobset.yaml", rank="JOB_COMPLETION_INDEX", first_node="{name}-node-0-0.{name}"),
    # The svc plugin gives every pod this name: job-task-index.job
    "volcano": _on_kubernetes("volcano.yaml", rank="VC_TASK_INDEX", first_node="{name}-node-0.{name}"),
}


ALSO_CALLED = {"kubernetes": "trainjob", "k8s": "trainjob"}
"""Aliases of targets."""
REGISTRY = Registry("fcp.targets", "target", "--target", (LOCAL, *TARGETS, *ALSO_CALLED))


def target_of(name: str) -> Target:
    """Return a target by name, except `LOCAL`."""
    if name in TARGETS:
        return TARGETS[name]
    plugin = REGISTRY.plugin(name)
    found = plugin.load()
    if not isinstance(found, Target):
        raise plugin.error(f"is no fcp_cli.extend.targets.Target but {type(found).__name__} at {plugin.entry.value}")
    return found


def job_files(target: Target, job: Job, *, template: Path | None = None) -> dict[str, str]:
    """Return the texts of a job's files by name, beginning with the one that starts a node's ranks."""
    with _faults_named(job.target):
        values = template_values(job, target.node(job), target.ready)
    rendered = [(name, _template(target, name)) for name in (target.template, *target.others)]
    if template is not None:
        rendered[0] = target.template, template
    files = {name: render(path, values) for name, path in rendered}
    for name, text in files.items():
        # Non-UTF-8 bytes in arguments or paths appear as lone surrogates.
        if lone := re.search("[\ud800-\udfff]+", text):
            raise UsageError(f"{name} cannot hold {lone[0]!a}: an argument or a path is not UTF-8 text")
    return files


def start_command(target: Target, job: Job, folder: Path) -> tuple[str, ...]:
    """Return the command that starts a job from the folder of its files."""
    with _faults_named(job.target):
        words = tuple(target.start(folder))
        shlex.join(words)  # raises unless all words are strings
        return words


@contextmanager
def _faults_named(name: str) -> Iterator[None]:
    """Convert an exception of a third-party target to a one-line error that names its package."""
    try:
        yield
    except FcpError:
        raise
    except (Exception, SystemExit) as error:
        if name in TARGETS:
            raise
        raise REGISTRY.plugin(name).error("failed", error) from error


def _template(target: Target, name: str) -> Path:
    return shipped_template(name) if target.folder is None else target.folder / f"{name}{SUFFIX}"
