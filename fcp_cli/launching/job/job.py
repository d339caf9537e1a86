"""A job: one frozen value, from which commands, files and checks are made by pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fcp_cli import __version__
from fcp_cli.cost.kernel_names import KernelChoice
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.launching.request import LOCAL, Launcher, NumaBinding
from fcp_cli.machine.devices import LocalDevices
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata.job_facts import PLANNING_VARIABLE, PlanningWish
from fcp_cli.plan.metadata.online import OnlineSettings
from fcp_cli.plan.metadata.plan_metadata import ManifestReference, PlanMetadata, Sync
from fcp_cli.runs.folder import RunPaths
from fcp_cli.training.settings import TrainSettings

# Environment of the job; the runtime inside the script reads them.
PLAN_VARIABLE = "FCP_PLAN"
METRICS_VARIABLE = "FCP_METRICS"
RUN_DIR_VARIABLE = "FCP_RUN_DIR"
MODEL_VARIABLE = "FCP_MODEL"  # set for a script when --model was given
PROBE_VARIABLE = "FCP_PROBE"  # for a script: 1 compares numbers before the first step, 0 does not
ONLINE_VARIABLE = "FCP_ONLINE"  # for a script that plans while it trains: its settings file
TIMEOUT_VARIABLE = "FCP_RANK_TIMEOUT"  # seconds
JOIN_VARIABLE = "FCP_JOIN_TIMEOUT"  # seconds, for ranks of several nodes

TRAINER = ("-m", "fcp_cli.training.train")
ADDRESS_TO_FILL_IN = "NODE0_ADDRESS"
"""Stands for an address that only the reader of a printed command knows."""

_BFLOAT16_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One variable of the job's environment.

    Attributes:
        value: the value on the ranks; "" if each node finds its own when it starts.
        reason: why it is set at all.
        source: the source of the value.
        is_given: whether the user had set it, so that fcp does not change it.
    """

    name: str
    value: str
    reason: str
    source: str
    is_given: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The part of a job that only a cluster's scheduler needs.

    Attributes:
        name: the name of the job: lower-case letters, digits and dashes, beginning with a letter.
        directory: the working directory of the program.
        interface_variables: names of variables that hold each node's own network interface.
        namespace: the namespace of the job on Kubernetes; "": the one that kubectl is set to.
        output: the file into which Slurm writes the batch script's output; None: the run's logs.
        record: the launch record, which the first node puts into the run directory; None: it is there already.
        values: variables of the target's templates that options set; docs/reference/templates.md lists them.
    """

    name: str
    directory: Path
    interface_variables: tuple[str, ...] = ()
    namespace: str = ""
    output: Path | None = None
    record: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job: its program, machines, processes, and output folders.

    Attributes:
        plan: the plan, as typed, for messages; the ranks are given its absolute path, the same on every node.
        metadata: the metadata of the plan.
        machine: the machine that the ranks run on; of the nodes of a cluster only the kind of device is known.
        run_dir: absolute path, shared by all nodes.
        num_nodes: machines; 1 runs here.
        processes_per_node: devices used on each.
        node_rank: this machine's number; None if it is not one of the nodes (a dry run, a cluster).
        program: started by the launcher: ("script.py",) or ("-m", "package.module"); by default the bundled trainer.
        arguments: the arguments of the program.
        settings: the settings of the bundled trainer; None for a script.
        model: the model that is trained; None if only the user's script knows.
        needs_torch: whether the ranks run torch; MindSpore's own scripts do not.
        environment: the environment of the job, in addition to FCP_PLAN, FCP_METRICS and FCP_RUN_DIR.
        variables: the environment of the job's stack, with reasons.
        hosts: names of the nodes in order, if they were listed.
        master_addr, master_port: the address and port of the rendezvous; used only with several nodes.
        join_timeout_seconds: how long the nodes wait for each other; None: as long as the launcher does by itself.
        rank_timeout_seconds: how long ranks wait for each other; None: as long as torch does by itself.
        attention_kernel: the attention kernel of NVIDIA devices, for all calls that it takes.
        numa_binding: how torchrun binds a rank to the cores near its device; None: not at all.
        grace_seconds: the time from SIGTERM or SIGHUP to the end of everything, whether the step has ended or not.
        log_dir: the folder into which each rank's output goes; None leaves it on the terminal.
        python: the interpreter that runs the launcher and the ranks.
        launcher: the launcher of the ranks of each node.
        target: a name of `targets.catalog.REGISTRY`.
        cluster: further fields of a target's files; None for `LOCAL`.
        online: planning settings of a script that plans while it trains; None: it follows a plan.
        planning: options for the plan that a script's loop has made; None: there is a plan, or a stream.
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
    variables: tuple[Variable, ...] = ()
    hosts: tuple[str, ...] = ()
    master_addr: str = ""
    master_port: int = 29500
    join_timeout_seconds: int | None = None
    rank_timeout_seconds: int | None = None
    attention_kernel: KernelChoice = "auto"
    numa_binding: NumaBinding | None = None
    grace_seconds: int = 45
    log_dir: Path | None = None
    python: str = sys.executable
    launcher: Launcher = "torchrun"
    target: str = LOCAL
    cluster: Cluster | None = None
    online: OnlineSettings | None = None
    planning: PlanningWish | None = None

    @property
    def stack(self) -> str:
        """The kind of device of the ranks: `cpu`, `cuda`, `npu`, or `unknown` on a head node without torch."""
        return self.machine.device

    @property
    def is_bundled(self) -> bool:
        """Return whether the bundled trainer runs, not a script."""
        return self.program == TRAINER

    @property
    def paths(self) -> RunPaths:
        return RunPaths(run_dir=self.run_dir)

    @property
    def parameters(self) -> int:
        """Parameters of the bundled trainer's model; 0 for a script, whose model is not known."""
        return 0 if self.settings is None else load_model(self.settings.model).parameters

    @property
    def kept_checkpoints(self) -> int:
        """Checkpoints that the run directory needs space for; 0 for a script, which keeps its own."""
        return 0 if self.settings is None else self.settings.keep

    @property
    def profile(self) -> CostProfile | None:
        """The plan's cost profile; None if it has none that can be read."""
        return _profile(self.metadata.cost_profile)

    @property
    def hop_bytes(self) -> int | None:
        """The largest message of a ring in bytes; None if the model is not known.

        It is the keys and values that a device of a rank holds of its token budget: one layer, in bfloat16.
        """
        name = self.model or (self.profile.model if self.profile is not None else None)
        with suppress(ProfileError):
            if name is not None:
                spec = load_model(name)
                sizes = spec.hop_elements(self.metadata.tensor_parallel)
                return sizes * _BFLOAT16_BYTES * self.metadata.tokens_per_rank
        return None

    def job_environment(self) -> dict[str, str]:
        """Return the job's variables on top of fcp's own environment."""
        return {
            PLAN_VARIABLE: str(self.plan.absolute()),
            METRICS_VARIABLE: str(self.paths.metrics),
            RUN_DIR_VARIABLE: str(self.run_dir),
            **({} if self.online is None else {ONLINE_VARIABLE: str(self.paths.online)}),
            **({} if self.planning is None else {PLANNING_VARIABLE: str(self.paths.planning)}),
            **self.environment,
        }

    def started_on(self, node_rank: int) -> Job:
        """Return the job as `fcp launch` starts it on one of its nodes: the same for --dry-run, the record and the run.

        The ranks print into the first `logs/start-NNN` that is not there yet, `-nodeK` behind it on several nodes. The
        bundled trainer shows no progress itself: fcp does, from the metrics.
        """
        node = "" if self.num_nodes == 1 else f"-node{node_rank}"
        number = 1
        while (log_dir := self.paths.logs / f"start-{number:03d}{node}").exists():
            number += 1
        quiet = () if self.settings is None else ("--quiet",)
        return replace(self, log_dir=log_dir, arguments=(*self.arguments, *quiet))


def unmade_plan(*, ranks: int, ranks_per_node: int, sync: Sync = "iteration", tokens_per_rank: int = 1) -> PlanMetadata:
    """Return the metadata of a plan without a file, of which nothing else is known."""
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
    """Return the value of `--flag VALUE` or `--flag=VALUE` among a script's arguments; the last one counts."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
