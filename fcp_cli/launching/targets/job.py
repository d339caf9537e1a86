"""What a job on a cluster is, beside its launch specification, and what a template is told of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcp_cli import __version__
from fcp_cli.launching.node_command import node_argv, node_environment
from fcp_cli.launching.spec import LaunchSpec

# A Kubernetes name has at most 63 characters, and controllers append to it.
_LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A persistent volume claim and the folder where the containers see it."""

    claim: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A launch specification and what a scheduler wants to know besides.

    Attributes:
        spec: its paths are the same on every node.
        name: lower-case letters, digits and dashes, beginning with a letter.
        device: `cpu`, `cuda` or `npu`: what is asked of the scheduler, one per process.
        directory: where the program is started.
        interface_variables: names of variables that hold each node's own network interface.
        hosts: the nodes' addresses in the order of the plan's nodes; empty where the scheduler chooses them.
        setup: lines of shell that every node runs first.
        sbatch_options: further options for Slurm, as `--partition=gpu`.
        image: of the containers.
        mounts: of the containers.
        record: the resolved launch, which the first node puts into the run directory; None: it is there already.
    """

    spec: LaunchSpec
    name: str
    device: str
    directory: Path
    interface_variables: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    sbatch_options: tuple[str, ...] = ()
    image: str = ""
    mounts: tuple[Mount, ...] = ()
    record: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What only the node knows, as a `shell.variable` or a text that holds some.

    Attributes:
        rank: the node's number.
        master_addr: address of node 0.
        log_name: folder of this start and node below the run's logs.
    """

    rank: str
    master_addr: str
    log_name: str


def template_values(job: ClusterJob, node: NodeFacts, ready: Callable[[str], str]) -> dict[str, Any]:
    """Every variable that a template sees; docs/how-to/launch.md lists them.

    Args:
        job: what is launched.
        node: how a node finds its own number.
        ready: makes a word ready for the file: `shell.quote` or `shell.kubernetes_word`.
    """
    log_dir = job.spec.paths.logs / node.log_name
    spec = replace(job.spec, master_addr=node.master_addr, log_dir=log_dir)
    command = [
        *(spec.python, "-m", "fcp_cli.launching.node", f"--node-rank={node.rank}", f"--log-dir={log_dir}"),
        *(f"--interface-for={name}" for name in job.interface_variables),
        *((f"--master-addr={node.master_addr}", f"--master-port={spec.master_port}") if spec.num_nodes > 1 else ()),
        *((f"--record={job.record}",) if job.record is not None else ()),
        *("--", *node_argv(spec, node_rank=node.rank)),
    ]
    return {
        "fcp_version": __version__,
        "job_name": job.name,
        "launcher": spec.launcher,
        "device": job.device,
        "num_nodes": spec.num_nodes,
        "processes_per_node": spec.processes_per_node,
        "plan": str(spec.plan),
        "run_dir": str(spec.run_dir),
        "directory": str(job.directory),
        "master_port": spec.master_port,
        "environment": {name: ready(value) for name, value in node_environment(spec).items()},
        "command": [ready(word) for word in command],
        "hosts": list(job.hosts),
        "setup": list(job.setup),
        "sbatch_options": list(job.sbatch_options),
        "image": job.image,
        "mounts": [{"claim": mount.claim, "path": mount.path} for mount in job.mounts],
    }


def job_name(text: str) -> str:
    """A name that Slurm and Kubernetes take, out of any text."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:_LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"fcp-{name}".rstrip("-")
