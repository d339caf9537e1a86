"""Template variables of a job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcp_cli import __version__
from fcp_cli.errors import UsageError
from fcp_cli.launching.job.commands import node_argv, node_environment
from fcp_cli.launching.job.job import Job
from fcp_cli.words import has_control_characters

# Kubernetes names have at most 63 characters, and controllers append to them.
_LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Values known only on the node, as text with `shell.variable` placeholders.

    Attributes:
        rank: node rank.
        master_addr: address of node 0.
        log_name: name of the log folder of this start and node, in the run's logs.
    """

    rank: str
    master_addr: str
    log_name: str


def template_values(job: Job, node: NodeFacts, ready: Callable[[str], str]) -> dict[str, Any]:
    """Return all template variables; see docs/reference/templates.md.

    Args:
        job: job with `cluster` set.
        node: rank and master address as placeholders.
        ready: quotes a word for the file: `shell.quote` or `shell.kubernetes_word`.
    """
    cluster = job.cluster
    assert cluster is not None
    log_dir = job.paths.logs / node.log_name
    job = replace(job, master_addr=node.master_addr, log_dir=log_dir)
    command = [
        *(job.python, "-m", "fcp_cli.launching.node", f"--node-rank={node.rank}", f"--log-dir={log_dir}"),
        *(f"--interface-for={name}" for name in cluster.interface_variables),
        *((f"--master-addr={node.master_addr}", f"--master-port={job.master_port}") if job.num_nodes > 1 else ()),
        *((f"--record={cluster.record}",) if cluster.record is not None else ()),
        *("--", *node_argv(job, node_rank=node.rank)),
    ]
    return {
        "fcp_version": __version__,
        "job_name": cluster.name,
        "launcher": job.launcher,
        "device": job.stack,
        "num_nodes": job.num_nodes,
        "processes_per_node": job.processes_per_node,
        "plan": str(job.plan.absolute()),
        "run_dir": str(job.run_dir),
        "directory": str(cluster.directory),
        "master_port": job.master_port,
        "environment": {name: ready(value) for name, value in node_environment(job).items()},
        "command": [ready(word) for word in command],
        "hosts": list(job.hosts),
        "namespace": cluster.namespace,
        "output": _sbatch_output(cluster.output or job.paths.logs),
        **cluster.values,
        "srun_options": [ready(option) for option in cluster.values["srun_options"]],
    }


def _sbatch_output(folder: Path) -> str:
    """Return the log path for an #SBATCH directive, which must be a single line."""
    if has_control_characters(str(folder)):
        raise UsageError(f"{str(folder)!r} has a control character, which files of a job cannot hold; rename it")
    return shlex.quote(f"{str(folder).replace('%', '%%')}/slurm-%j.log")


def job_name(text: str) -> str:
    """Convert any text to a name valid in Slurm and Kubernetes."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:_LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"fcp-{name}".rstrip("-")
