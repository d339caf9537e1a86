"""Options of `fcp launch`, for `resolve`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from fcp_cli.cost.recipe import KernelChoice
from fcp_cli.training.settings import Device, TrainSettings
from fcp_cli.util.options import MOST_RANKS, MOST_ROWS, MOST_TOKENS, MOST_WAIT, Arg, Opt, OptionGroup

Launcher: TypeAlias = Literal["torchrun", "msrun"]
"""Program that starts the ranks of a node."""
Inject: TypeAlias = Literal["entry", "env", "none"]
"""How a program is made to follow the plan: through the runtime's entry point, its environment, or not at all."""
NumaBinding: TypeAlias = Literal["node", "socket", "exclusive", "core-complex"]
"""torchrun's CPU binding: cores of a NUMA node or socket, an exclusive share, or cores with a shared cache."""
LOCAL: Final = "local"
"""Target for jobs on this machine."""

CLUSTERS: Final = "On a cluster"
"""Title of the options for cluster jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Options for cluster jobs."""

    target: Annotated[
        str | None,
        Opt(
            "local, or a name from 'fcp list targets', e.g. slurm.",
            unset="by the options",
            common=True,
            group="job files",
        ),
    ] = None
    template: Annotated[
        Path | None,
        Opt(
            "Custom template for the job's files.", metavar="FILE.j2", unset="the target's in launchers/", trust="runs"
        ),
    ] = None
    setup: Annotated[
        tuple[str, ...], Opt("Shell command that a node runs first; repeatable.", metavar="LINE", trust="runs")
    ] = ()
    env: Annotated[
        tuple[str, ...],
        Opt(
            "Variable of the job; without =VALUE, read at its start; repeatable.",
            metavar="NAME=VALUE",
            trust="runs",
        ),
    ] = ()
    max_restarts: Annotated[
        int,
        Opt("Times that the cluster starts the job again after a time limit or a failure.", min=0, max=MOST_WAIT),
    ] = 0
    python: Annotated[str | None, Opt("Interpreter on the nodes.", metavar="PATH", unset="this one", trust="runs")] = (
        None
    )
    hostfile: Annotated[Path | None, Opt("Nodes, one per line, node 0 first.", trust="runs", group="ssh and Slurm")] = (
        None
    )
    sbatch_option: Annotated[
        tuple[str, ...], Opt("Option of sbatch, e.g. --partition=gpu; repeatable.", metavar="OPTION", trust="runs")
    ] = ()
    srun_option: Annotated[
        tuple[str, ...],
        Opt("Option of srun, e.g. --container-image=IMAGE; repeatable.", metavar="OPTION", trust="runs"),
    ] = ()
    image: Annotated[
        str | None,
        Opt(
            "Container image with fcp, torch and your code; Kubernetes needs one.",
            trust="runs",
            group="containers",
        ),
    ] = None
    mount: Annotated[
        tuple[str, ...],
        Opt("Volume of a container, e.g. CLAIM:/path; repeatable.", metavar="CLAIM:PATH", trust="runs"),
    ] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """Options of a launch; None: detected or defaulted.

    Attributes:
        program: script and arguments, or `-m`, module and arguments; (): the bundled trainer.
        training: settings of the bundled trainer as given, by field of `TrainSettings`.
        preflight, explain, json, output: actions in addition to, or instead of, starting the job.
    """

    program: Annotated[
        tuple[str, ...], Arg("Your own script (or -m MODULE) instead of the bundled trainer.", metavar="-- SCRIPT ARGS")
    ] = ()
    plan: Annotated[Path | None, Opt("Plan to follow.", unset="plan.parquet", common=True, group="The job")] = None
    model: Annotated[
        str | None,
        Opt("Checkpoint's folder, shipped model or its YAML.", metavar="NAME|FILE", unset="the plan's", common=True),
    ] = None
    ranks: Annotated[
        int | None, Opt("Ranks of a script without a plan.", min=1, max=MOST_RANKS, unset="the plan's", common=True)
    ] = None
    device: Annotated[Device, Opt("Kind of device that ranks use.", common=True)] = "auto"
    run_dir: Annotated[
        Path | None,
        Opt(
            "Metrics, checkpoints and logs.",
            metavar="DIR",
            unset="a new runs/NAME-NNN",
            trust="writes",
            common=True,
        ),
    ] = None
    resume: Annotated[bool, Opt("Continue a run from its newest checkpoint.", common=True)] = False
    manifest: Annotated[
        tuple[Path, ...],
        Opt("Manifest of the plan, to locate tokens; once per source of a mixture.", unset="next to the plan"),
    ] = ()
    synthetic: Annotated[bool, Opt("Train on random tokens of the planned lengths.")] = False
    grace: Annotated[
        int | None,
        Opt(
            "Time for the current step and a checkpoint after SIGTERM, before ranks are killed.",
            min=1,
            max=MOST_WAIT,
            metavar="SECONDS",
            unset="by the plan, at least 45",
        ),
    ] = None
    rank_timeout: Annotated[
        int | None,
        Opt(
            "Time-out of ranks that wait for each other.",
            min=1,
            max=MOST_WAIT,
            metavar="SECONDS",
            unset="600, 1800 on CPUs",
        ),
    ] = None
    attention_kernel: Annotated[
        KernelChoice, Opt("Attention kernel of NVIDIA devices, for all calls that it supports; auto: by measurement.")
    ] = "auto"
    numa_binding: Annotated[NumaBinding | None, Opt("Keep ranks on cores near their device.", unset="not bound")] = None
    dry_run: Annotated[
        bool, Opt("Print the commands; start and write nothing.", common=True, group="Check before the start")
    ] = False
    inject: Annotated[
        Inject | None,
        Opt("How your script is made to follow the plan.", unset="entry", group="A script of your own"),
    ] = None
    accept_other_batches: Annotated[
        bool, Opt("Train on the plan's batches even if the script packs rows or groups them by length.")
    ] = False
    online: Annotated[
        bool, Opt("Plan the stream of your script while it trains.", common=True, group="Plan while it trains")
    ] = False
    profile: Annotated[
        Path | None, Opt("Cost profile of a job that starts without a plan.", unset="profile.yaml here, else computed")
    ] = None
    global_batch_size: Annotated[
        int | None,
        Opt("Sequences per step of an online job.", min=1, max=MOST_ROWS, unset="the stream gives whole batches"),
    ] = None
    global_batch_tokens: Annotated[
        int | None, Opt("Maximum tokens per step of an online job.", min=1, max=MOST_TOKENS, unset="no limit")
    ] = None
    nodes: Annotated[
        int | None,
        Opt(
            "Machines to spread the ranks over.",
            min=1,
            max=MOST_RANKS,
            group="Several nodes",
            unset="1",
            common=True,
        ),
    ] = None
    node_rank: Annotated[int | None, Opt("Number of this node, from 0.", min=0, max=MOST_RANKS, common=True)] = None
    master_addr: Annotated[str | None, Opt("Address of node 0.", metavar="HOST", trust="runs", common=True)] = None
    master_port: Annotated[int, Opt("A free port of node 0.", min=0, max=65535)] = 29500
    join_timeout: Annotated[
        int, Opt("Time-out of nodes that wait for each other to start.", min=1, max=MOST_WAIT, metavar="SECONDS")
    ] = 300
    launcher: Annotated[Launcher, Opt("Program that starts a node's ranks.")] = "torchrun"
    cluster: Annotated[ClusterOptions, OptionGroup(CLUSTERS)] = ClusterOptions()
    training: Annotated[Mapping[str, Any], OptionGroup("Bundled trainer", of=TrainSettings)] = field(
        default_factory=dict
    )
    preflight: Annotated[
        bool,
        Opt("Run all checks of a launch; start nothing.", common=True, group="Check before the start"),
    ] = False
    explain: Annotated[bool, Opt("Print why each variable is set and where it comes from; start nothing.")] = False
    json: Annotated[bool, Opt("Print one JSON document on stdout.")] = False
    output: Annotated[
        Path | None,
        Opt(
            "Write the job's files there; start nothing.",
            flags=("--output", "-o"),
            metavar="DIR",
            group=f"{CLUSTERS}: job files",
            trust="writes",
            common=True,
        ),
    ] = None
