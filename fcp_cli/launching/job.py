"""`Job`, a frozen value from which pure functions build commands, files and findings."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fcp_cli import __version__
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.cost.recipe import KernelChoice
from fcp_cli.errors import PlanError, ProfileError, RunError, UsageError
from fcp_cli.launching.request import LOCAL, Launcher, NumaBinding
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PLANNING_VARIABLE, ManifestReference, OnlineSettings, PlanMetadata, PlanningWish, Sync
from fcp_cli.plan.replan_command import plan_again
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.training.settings import TrainSettings
from fcp_cli.util.inputs import parse_yaml
from fcp_cli.util.machine import LocalDevices

# Environment variables read by the runtime inside the script.
PLAN_VARIABLE = "FCP_PLAN"
METRICS_VARIABLE = "FCP_METRICS"
RUN_DIR_VARIABLE = "FCP_RUN_DIR"
MODEL_VARIABLE = "FCP_MODEL"  # for scripts, if --model was given
PROBE_VARIABLE = "FCP_PROBE"  # for scripts: 1 enables the numeric comparison before the first step
ONLINE_VARIABLE = "FCP_ONLINE"  # for scripts that plan online: path of the settings file
TIMEOUT_VARIABLE = "FCP_RANK_TIMEOUT"  # seconds
JOIN_VARIABLE = "FCP_JOIN_TIMEOUT"  # seconds, for ranks of several nodes

TRAINER = ("-m", "fcp_cli.training.train")
ADDRESS_TO_FILL_IN = "NODE0_ADDRESS"
"""Placeholder for an address that only the reader of a printed command knows."""

_BFLOAT16_BYTES = 2
_LEAST_GRACE_SECONDS = 45
_SAVED_PARAMETERS_PER_SECOND = 1e9 / 14  # of a node: weights, masters and moments, to storage that others share
LEAD_SECONDS = 20
"""Time of a scheduler beyond the grace time of the ranks: to end the launcher, and to report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """An environment variable of the job.

    Attributes:
        value: value on the ranks; "" if each node determines its own.
        reason: why it is set.
        source: origin of the value.
        is_given: whether the user set it, so that fcp keeps it.
    """

    name: str
    value: str
    reason: str
    source: str
    is_given: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job: program, machines, processes and output folders.

    Attributes:
        plan: plan path as typed, for messages; ranks get the absolute path, which is equal on every node.
        metadata: metadata of the plan.
        machine: devices that ranks run on; for cluster nodes only the device kind is known.
        run_dir: absolute path, shared by all nodes.
        num_nodes: number of nodes.
        processes_per_node: processes, one per device, on each node.
        node_rank: rank of this node; None if it is not part of the job (a dry run, a cluster).
        program: program for the launcher: ("script.py",) or ("-m", "package.module"); by default the bundled trainer.
        arguments: arguments of the program.
        settings: settings of the bundled trainer; None for a script.
        model: trained model; None if only the script knows it.
        needs_torch: whether ranks run torch; MindSpore scripts do not.
        environment: variables besides FCP_PLAN, FCP_METRICS and FCP_RUN_DIR.
        given: values of --env for the files of a cluster job; the launch record has none of them.
        variables: variables for the device kind, with reasons.
        hosts: names of the nodes in order, if listed.
        master_addr, master_port: rendezvous address and port, for several nodes.
        join_timeout_seconds: start-up timeout of nodes; None: the launcher's default.
        rank_timeout_seconds: timeout of ranks that wait for each other; None: 600, on CPUs 1800.
        attention_kernel: attention kernel on NVIDIA devices, for all calls that it supports.
        numa_binding: how torchrun binds ranks to cores near their device; None: unbound.
        grace_seconds: time from SIGTERM or SIGHUP until everything is killed, even within a step.
        log_dir: folder for the ranks' output; None: the terminal.
        python: interpreter of launcher and ranks.
        launcher: program that starts the ranks of a node.
        target: a name of `targets.REGISTRY`.
        directory: working directory of the program on a cluster.
        output: folder that gets the files of a cluster job, instead of the run directory.
        values: template variables set by options; see docs/reference/templates.md.
        online: settings of a script that plans online; None: it follows a plan.
        planning: options of the plan that the script requests itself; None: there is a plan, or it plans online.
    """

    plan: Path
    metadata: PlanMetadata
    machine: LocalDevices
    run_dir: Path
    num_nodes: int
    processes_per_node: int
    node_rank: int | None = None
    program: tuple[str, ...] = TRAINER
    arguments: tuple[str, ...] = ()
    settings: TrainSettings | None = None
    model: str | None = None
    needs_torch: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[Variable, ...] = ()
    hosts: tuple[str, ...] = ()
    master_addr: str = ""
    master_port: int = 29500
    join_timeout_seconds: int | None = None
    rank_timeout_seconds: int | None = None
    attention_kernel: KernelChoice = "auto"
    numa_binding: NumaBinding | None = None
    grace_seconds: int = _LEAST_GRACE_SECONDS
    log_dir: Path | None = None
    python: str = sys.executable
    launcher: Launcher = "torchrun"
    target: str = LOCAL
    directory: Path = field(default_factory=Path.cwd)
    output: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    online: OnlineSettings | None = None
    planning: PlanningWish | None = None

    @property
    def stack(self) -> str:
        """Device kind of the ranks: `cpu`, `cuda`, `npu`, or `unknown` on a head node without torch."""
        return self.machine.device

    @property
    def is_bundled(self) -> bool:
        """Whether the job runs the bundled trainer instead of a script."""
        return self.program == TRAINER

    @property
    def paths(self) -> RunPaths:
        return RunPaths(run_dir=self.run_dir)

    @property
    def parameters(self) -> int:
        """Parameters of the bundled trainer's model; 0 for a script."""
        return 0 if self.settings is None else load_model(self.settings.model).parameters

    @property
    def kept_checkpoints(self) -> int:
        """Number of checkpoints in the run directory; 0 for a script, which saves its own."""
        return 0 if self.settings is None else self.settings.keep

    @property
    def profile(self) -> CostProfile | None:
        """Cost profile of the plan, or None if it has no readable one."""
        return _profile(self.metadata.cost_profile)

    @property
    def hop_bytes(self) -> int | None:
        """Largest ring hop in bytes; None if the model is unknown.

        It holds one layer's keys and values of the token budget, in bfloat16, divided by tensor parallelism.
        """
        name = self.model or (self.profile.model if self.profile is not None else None)
        with suppress(ProfileError):
            if name is not None:
                spec = load_model(name)
                sizes = spec.hop_elements(self.metadata.tensor_parallel)
                return sizes * _BFLOAT16_BYTES * self.metadata.tokens_per_rank
        return None

    @property
    def needed_grace_seconds(self) -> int:
        """Time for the plan's longest step and half of it again, and for a checkpoint, as far as they are known."""
        longest, parameters = 0.0, self.parameters
        with suppress(PlanError):
            longest = float(PlanReader(self.plan).predicted_seconds()[1].max(initial=0.0))
        with suppress(ProfileError):
            name = self.model or (self.profile.model if self.profile is not None else None)
            parameters = load_model(name).parameters if name is not None else parameters
        saving = parameters / (_SAVED_PARAMETERS_PER_SECOND * self.num_nodes)
        return max(_LEAST_GRACE_SECONDS, math.ceil(1.5 * longest + saving))

    def job_environment(self) -> dict[str, str]:
        """Return the variables that the job adds to the inherited environment."""
        return {
            PLAN_VARIABLE: str(self.plan.absolute()),
            METRICS_VARIABLE: str(self.paths.metrics),
            RUN_DIR_VARIABLE: str(self.run_dir),
            **({} if self.online is None else {ONLINE_VARIABLE: str(self.paths.online)}),
            **({} if self.planning is None else {PLANNING_VARIABLE: str(self.paths.planning)}),
            **self.environment,
        }

    def started_on(self, node_rank: int) -> Job:
        """Return the job as started on a node, as used by --dry-run, the launch record and the run.

        Ranks log to the first unused `logs/start-NNN`, with the suffix `-nodeK` for several nodes. The bundled trainer
        gets --quiet, since fcp prints progress from the metrics.
        """
        node = "" if self.num_nodes == 1 else f"-node{node_rank}"
        number = 1
        while (log_dir := self.paths.logs / f"start-{number:03d}{node}").exists():
            number += 1
        quiet = () if self.settings is None else ("--quiet",)
        return replace(self, log_dir=log_dir, arguments=(*self.arguments, *quiet))


def is_assumed(metadata: PlanMetadata) -> bool:
    """Return whether the plan is only assumed: a real plan has a hash."""
    return not metadata.plan_hash


def unmade_plan(*, ranks: int, ranks_per_node: int, sync: Sync = "iteration", tokens_per_rank: int = 1) -> PlanMetadata:
    """Return placeholder metadata for a plan that does not exist yet, without hash or cost profile."""
    return PlanMetadata(
        fcp_version=__version__,
        num_ranks=ranks,
        ranks_per_node=ranks_per_node,
        sync=sync,
        global_batch_size=1,
        tokens_per_rank=tokens_per_rank,
        seed=0,
        shuffle=True,
        solver="",
        manifest=ManifestReference(name="", rows=0, content_hash=""),
        cost_profile="",
    )


@cache
def _profile(text: str) -> CostProfile | None:
    with suppress(ProfileError):
        return parse_cost_profile(text, name="the plan's cost profile")
    return None


def argument(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of `--flag VALUE` or `--flag=VALUE` in a script's arguments, or None."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


# Distributes a plan's ranks over nodes. Pure functions.

THIS_MACHINE = "this-machine"


def check_ranks(plan: Path, metadata: PlanMetadata, ranks: int | None, model: str | None = None) -> None:
    """Raise RunError if --ranks differs from the plan; `model` is the --model option, for the message."""
    if ranks is not None and ranks != metadata.num_ranks:
        raise RunError(
            f"{plan} is for {metadata.num_ranks} ranks, but --ranks is {ranks}; make a plan for {ranks} with: "
            f"{plan_again(metadata, plan, ranks=ranks, given_model=model)}"
        )


def planned_nodes(metadata: PlanMetadata) -> int:
    """Return the number of nodes for which the plan was made.

    Megatron numbers processes stage by stage, so a node smaller than a stage only has ranks of one stage. A
    larger node holds as many whole stages as fit.
    """
    nodes_per_stage = -(-metadata.num_ranks // metadata.ranks_per_node)
    if nodes_per_stage > 1:
        return nodes_per_stage * metadata.pipeline_parallel
    stage_processes = metadata.num_ranks * metadata.tensor_parallel
    stages_per_node = max(1, (devices_per_node(metadata) or metadata.num_devices) // stage_processes)
    return -(-metadata.pipeline_parallel // stages_per_node)


def planned_profile(metadata: PlanMetadata) -> dict[str, Any]:
    """Return the plan's cost profile as a mapping; {} if it has none."""
    try:
        profile = parse_yaml(metadata.cost_profile, name="the plan's cost profile", error=PlanError)
    except PlanError:
        return {}
    return profile if isinstance(profile, dict) else {}


def planned_cluster(metadata: PlanMetadata) -> str:
    """Return the cluster named in the plan's cost profile, or ""."""
    return str(planned_profile(metadata).get("cluster") or "")


def devices_per_node(metadata: PlanMetadata) -> int | None:
    """Return the devices per node of the plan's cluster; None if it is unknown or is this machine."""
    try:
        cluster = load_cluster(planned_cluster(metadata))
    except ProfileError:
        return None
    return None if cluster.name == THIS_MACHINE else cluster.devices_per_node


def place(
    plan: Path,
    metadata: PlanMetadata,
    machine: LocalDevices,
    *,
    nodes: int | None,
    must_fit: bool,
    model: str | None = None,
) -> tuple[int, int]:
    """Distribute the job over nodes; return (nodes, processes per node).

    Args:
        plan: path of the plan, for messages.
        metadata: metadata of the plan.
        machine: this machine.
        nodes: number of nodes as given; None: this machine, or without `must_fit` the planned nodes if it is too small.
        must_fit: whether this machine runs a part of the job, so that too many processes raise RunError.
        model: model as given, for messages.
    """
    processes = metadata.num_devices
    if nodes is None:
        nodes = 1 if must_fit or processes <= machine.most_ranks else planned_nodes(metadata)
    if nodes < 1 or processes % nodes:
        raise UsageError(f"--nodes is {nodes}, which does not divide the {processes} processes of {plan}")
    per_node = processes // nodes
    devices = (
        None if must_fit or nodes == planned_nodes(metadata) or machine.device == "cpu" else devices_per_node(metadata)
    )
    if devices is not None and per_node > devices:
        raise UsageError(
            f"--nodes {nodes} puts {per_node} processes on a node, but {plan} is for {planned_cluster(metadata)}, "
            f"whose nodes have {devices} devices; give --nodes {planned_nodes(metadata)}, or plan for fewer ranks"
        )
    if must_fit and per_node > machine.most_ranks:
        raise RunError(_too_many(plan, metadata, machine, per_node, nodes, model))
    return nodes, per_node


def _too_many(
    plan: Path, metadata: PlanMetadata, machine: LocalDevices, per_node: int, nodes: int, model: str | None
) -> str:
    here = f"{plan} needs {per_node} processes on this machine, which holds {machine.most_ranks} ({machine.describe()})"
    ranks = max(1, machine.most_ranks // (metadata.devices_per_rank))
    fewer = f"plan for fewer ranks with: {plan_again(metadata, plan, ranks=ranks, given_model=model)}"
    wanted = max(planned_nodes(metadata), nodes)
    if wanted == 1:
        cpu = "" if machine.device == "cpu" else "train on the CPU with --device cpu, or "
        return f"{here}; {cpu}{fewer}"
    return (
        f"{here}; run --nodes {wanted} --master-addr HOST --node-rank K on each of {wanted} nodes "
        f"(--nodes {wanted} --dry-run prints their commands), or {fewer}"
    )


# Quotes commands for shells and Kubernetes; words may contain variables that are only known on the node.

# Delimits variables; process arguments cannot contain NUL.
_MARK = "\0"


def variable(name: str) -> str:
    """Return a placeholder for a shell variable on the machine that runs the command."""
    return f"{_MARK}{name}{_MARK}"


def quote(word: str) -> str:
    """Quote a word like shlex.quote; variables are double-quoted, as in --node-rank="$SLURM_NODEID"."""
    if not word:
        return "''"
    pieces = enumerate(word.split(_MARK))
    return "".join(f'"${piece}"' if index % 2 else (shlex.quote(piece) if piece else "") for index, piece in pieces)


def join(words: Iterable[str]) -> str:
    """Return a command line for a POSIX shell."""
    return " ".join(map(quote, words))


def kubernetes_word(word: str) -> str:
    """Format a word for a container command, which has no shell: variables become $(NAME), and $ becomes $$."""
    pieces = enumerate(word.split(_MARK))
    return "".join(f"$({piece})" if index % 2 else piece.replace("$", "$$") for index, piece in pieces)
