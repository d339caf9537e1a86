"""Completes a cluster job from options, and records assumptions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.launching.job import THIS_MACHINE, Job, devices_per_node, planned_cluster
from fcp_cli.launching.request import LOCAL, ClusterOptions
from fcp_cli.launching.targets import ALSO_CALLED, TARGETS, Target, job_name, target_of
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.util.console import Assumptions, note
from fcp_cli.util.files import shipped
from fcp_cli.util.inputs import read_text
from fcp_cli.util.machine import UNKNOWN_MACHINE, LocalDevices
from fcp_cli.util.network import is_host, is_loopback
from fcp_cli.util.words import nearest_words

_DECISIVE = {"hostfile": "scripts", "sbatch_option": "slurm", "srun_option": "slurm", "image": "trainjob"}
"""Option -> target that it implies without --target; other options fit several targets."""
_OF_ALL = frozenset({"template", "python", "env"})

_SHAPES = {
    "--image": (r"[A-Za-z0-9/][A-Za-z0-9._/:@#+-]*", "the name of an image, as registry/team/fcp:1.0"),
    "--mount": (
        r"(?P<claim>[a-z0-9]([-a-z0-9.]*[a-z0-9])?):(?P<path>/[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*)",
        "CLAIM:/path, a persistent volume claim and its mount path",
    ),
}
"""Option -> pattern of its values, whose groups are passed to templates, and its description in messages."""
_SKYPILOT = {"a100": "A100-80GB", "a100-40gb": "A100", "h100": "H100", "h200": "H200", "b200": "B200"}
"""Device of a shipped cluster -> its name in SkyPilot."""
_SSH_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Words of a variable's name whose value is a secret, unless the name says that the value is a path.
_SECRET_WORDS = {"APIKEY", "AUTH", "CREDENTIAL", "CREDENTIALS", "KEY", "PASSPHRASE"}
_SECRET_WORDS |= {"PASSWD", "PASSWORD", "PAT", "PWD", "SECRET", "SECRETS", "TOKEN"}
_PATH_WORDS = frozenset({"DIR", "FILE", "HOME", "PATH"})
# How the nodes of a target get a variable that the job's files only name; {names}: --env words, {job}: the job's name.
_READ_AT_START = {
    "slurm": "sbatch takes {names} from the shell that submits the job",
    "scripts": "every node reads {names} from its own environment; --setup '. FILE' can set them there",
    "skypilot": "start with: sky launch {flags} skypilot.yaml",
    "ray": "the driver reads {names} from its environment and hands them to the nodes",
    "kubernetes": "pods read {names} from a secret; make it once: kubectl create secret generic {job}-env {literals}",
}


def choose_target(request: ClusterOptions) -> str:
    """Return the named target, or the one implied by an option, else `local`."""
    meant = next((target for name, target in _DECISIVE.items() if getattr(request, name)), LOCAL)
    target = ALSO_CALLED.get(request.target or "", request.target or meant)
    takes = frozenset[str]() if target == LOCAL else target_of(target).options | _OF_ALL
    for name in (field.name for field in fields(ClusterOptions) if field.name != "target"):
        if getattr(request, name) and name not in takes:
            targets = [one for one, own in TARGETS.items() if name in own.options | _OF_ALL]
            raise UsageError(f"--{name.replace('_', '-')} is for --target {' or '.join(targets)}, not for {target}")
    return target


def refuse_local_options(target: str, *, node_rank: int | None, master_addr: str | None) -> None:
    """Raise UsageError for options that only apply to local jobs."""
    given = {"--node-rank": node_rank, "--master-addr": master_addr}
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"{flag} is for --target {LOCAL}; under {target} every node finds it by itself")


def hosts_of(request: ClusterOptions, num_nodes: int | None) -> tuple[str, ...]:
    """Return the hosts in the hostfile, node 0 first; () without one."""
    if request.hostfile is None:
        return ()
    hosts = read_hostfile(request.hostfile)
    if num_nodes is not None and num_nodes != len(hosts):
        raise UsageError(f"{request.hostfile} lists {len(hosts)} hosts, but --nodes is {num_nodes}")
    return hosts


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Read a hostfile as used by MindSpeed's scripts and DeepSpeed, node 0 first.

    It has a name or address per line; attributes (`slots=8`) and comments (`#`) are ignored.
    """
    lines = read_text(path, error=UsageError, label="the hostfile ").splitlines()
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        host = (line.split("#")[0].split() or [""])[0]
        if not host:
            continue
        user, at, machine = host.rpartition("@")
        # ssh would interpret -oProxyCommand=... as an option.
        if not is_host(machine) or (at and not _SSH_USER.fullmatch(user)):
            raise UsageError(f"{path}, line {number}: {host!r} is not a host; write a name or an address, e.g. node0")
        if host in hosts:
            raise UsageError(f"{path}, line {number}: {host} is already in line {hosts[host]}; list each node once")
        hosts[host] = number
    if not hosts:
        raise UsageError(f"the hostfile {path} lists no host; write one address a line, node 0 first")
    local = next((host for host in hosts if host == "localhost" or is_loopback(host)), None)
    if local is not None and len(hosts) > 1:
        raise UsageError(
            f"{path}, line {hosts[local]}: {local} means another machine on each of {len(hosts)} nodes; "
            "give its address"
        )
    return tuple(hosts)


def cluster_machine(
    device: str, metadata: PlanMetadata, find_machine: Callable[[], LocalDevices], assumed: Assumptions
) -> LocalDevices:
    """Return a description of the cluster's nodes, of which only the device kind is known here.

    Args:
        device: device kind as given; `auto`: that of the plan's cluster.
        metadata: metadata of the plan.
        find_machine: detects this machine; called only if the plan was made for it.
        assumed: records the choices.
    """
    cluster = planned_cluster(metadata)
    if device in ("cuda", "npu") and devices_per_node(metadata) and device != (kind := _device_kind(cluster)):
        raise UsageError(
            f"--device {device} contradicts the plan, which is for {cluster} (--device {kind}); plan for the cluster "
            "that the job runs on"
        )
    if device == "auto":
        device = find_machine().device if cluster == THIS_MACHINE else _device_kind(cluster)
        assumed.assume("--device", device, f"the plan's cost profile is of {cluster or 'an unknown cluster'}")
    return replace(UNKNOWN_MACHINE, device=device)


def _device_kind(cluster: str) -> str:
    """Return `npu` for Ascend clusters, else `cuda`."""
    from fcp_cli.models.cluster import load_cluster

    try:
        return "npu" if "ascend" in load_cluster(cluster).device.lower() else "cuda"
    except ProfileError:
        return "npu" if "ascend" in cluster.lower() else "cuda"


def for_cluster(request: ClusterOptions, job: Job, output: Path | None, assumed: Assumptions) -> Job:
    """Complete a resolved job with the fields that its target's templates need.

    Communication variables that the user has exported here are also set on the nodes.
    """
    target = target_of(job.target)
    if (target.is_container or request.mount) and request.image is None:
        raise UsageError("containers need --image: the name of one with fcp, torch and your code")
    if request.image is not None:
        _parts("--image", request.image)
    hosts = job.hosts
    if job.target == "scripts" and not hosts:
        hosts = tuple(f"node{k}" for k in range(job.num_nodes))
        assumed.assume("--hostfile", f"{hosts[0]} to {hosts[-1]}", "names to replace by those of your nodes")
    exported = {v.name: v.value for v in job.variables if v.value}
    if request.image is not None:
        exported.pop("LD_LIBRARY_PATH", None)  # an image has libraries of its own
    return replace(
        job,
        python=_python(request, is_container=request.image is not None, assumed=assumed),
        environment={**job.environment, **exported},
        given=split_variables(request.env)[0],
        hosts=hosts,
        master_addr=hosts[0] if hosts else job.master_addr,
        output=output,
        values=option_values(request, target, replace(job, output=output), assumed),
    )


def option_values(request: ClusterOptions, target: Target, job: Job, assumed: Assumptions) -> dict[str, Any]:
    """Return template variables set by options; see docs/reference/templates.md."""
    return {
        "setup": request.setup,
        "forwarded": _forwarded(request, target, job),
        "sbatch_options": [_sbatch_option(text, job) for text in request.sbatch_option],
        "srun_options": [*_pyxis(request, job), *(_option_of("srun", text) for text in request.srun_option)],
        "max_restarts": request.max_restarts,
        "accelerator": _accelerator(job, assumed),
        "image": request.image or "",
        "mounts": _mounts(request, job, assumed) if target.is_container else [],
    }


def _python(request: ClusterOptions, *, is_container: bool, assumed: Assumptions) -> str:
    if request.python is not None or is_container:
        return request.python or "python"
    assumed.assume("--python", sys.executable, "it must be there on every node")
    return sys.executable


def _accelerator(job: Job, assumed: Assumptions) -> str:
    """Return the accelerator's name in SkyPilot; "" on CPUs, for other targets, and if the plan does not tell it."""
    if job.target != "skypilot" or job.stack == "cpu":
        return ""
    name = _SKYPILOT.get(planned_cluster(job.metadata).rpartition("-")[0], "")
    if not name:
        devices = f"NAME:{job.processes_per_node}"
        assumed.warn(f"the plan does not name the nodes' devices; start with: sky launch --gpus {devices}")
    return name


def _option_of(program: str, text: str) -> str:
    option = text.removeprefix("#SBATCH").strip()
    if not option.startswith("-") or len(option.splitlines()) != 1:
        example = {"sbatch": "--partition=gpu", "srun": "--container-image=/images/fcp.sqsh"}[program]
        raise UsageError(
            f"--{program}-option {text!r} is not one option of {program}; give it as --{program}-option={example}"
        )
    return option


def _pyxis(request: ClusterOptions, job: Job) -> list[str]:
    """Return srun's options, of its plug-in pyxis, with which --image is the container of a Slurm job."""
    if request.image is None or job.target != "slurm":
        return []
    folders = [job.directory, job.run_dir, job.plan.absolute().parent, *([] if job.output is None else [job.output])]
    mounts = request.mount or sorted({f"{folder}:{folder}" for folder in folders})
    options = {"image": request.image, "workdir": job.directory, "mounts": ",".join(mounts)}
    return [f"--container-{name}={value}" for name, value in options.items()]


def _sbatch_option(text: str, job: Job) -> str:
    """Return an option of sbatch; raise UsageError if it contradicts the job, or is misspelt."""
    option = _option_of("sbatch", text)
    name, value = re.fullmatch(r"(--[^= ]*|-.)[= ]?(.*)", option, re.DOTALL).groups()  # type: ignore[union-attr]
    fixed = {"--nodes": job.num_nodes, "-N": job.num_nodes, "--ntasks-per-node": 1}.get(name)
    if fixed is not None and value != str(fixed):
        raise UsageError(f"--sbatch-option={option} contradicts the job, which needs {name} {fixed}; see --nodes")
    known = [f"--{one}" for one in (shipped("launchers") / "sbatch_options.txt").read_text(encoding="ascii").split()]
    if name.startswith("--") and name not in known and (near := nearest_words(name, known, cutoff=0.85)):
        raise UsageError(f"sbatch has no option {name}; did you mean {near[0]!r}?")  # else a plug-in's
    return option


def _parts(flag: str, text: str) -> dict[str, str]:
    """Parse an option's value by its pattern in `_SHAPES`; return the named groups, "" for missing ones."""
    pattern, wanted = _SHAPES[flag]
    found = re.fullmatch(pattern, text)
    if found is None:
        raise UsageError(f"{flag} is {text!r}; it must be {wanted}")
    return found.groupdict(default="")


def split_variables(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Split the words of --env into values for the job's files and names of variables that the job reads at its start.

    Files of a job are readable by others, so a value whose name says that it is a secret raises UsageError.
    """
    given, forwarded = dict[str, str](), []
    for text in words:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise UsageError(
                f"--env is {text!r}; it must be the name of a variable and a value, as HF_HOME=/shared/hub"
            )
        if name.startswith("FCP_"):
            raise UsageError(f"--env {name}: fcp sets the variables FCP_... of its jobs by itself")
        parts = name.upper().split("_")
        if equals and not _SECRET_WORDS.isdisjoint(parts) and parts[-1] not in _PATH_WORDS:
            raise UsageError(
                f"--env {name}=... would write a secret to the job's files; give --env {name}, without the value: the "
                "job reads it when it starts"
            )
        if equals:
            given[name] = value
        else:
            forwarded.append(name)
    return given, tuple(forwarded)


def _forwarded(request: ClusterOptions, target: Target, job: Job) -> tuple[str, ...]:
    """Return the variables that the job reads when it starts, after printing where from."""
    _, names = split_variables(request.env)
    if names:
        kind = "kubernetes" if target.is_container else job.target
        sentence = _READ_AT_START.get(kind, "the nodes read {names} from their environment")
        flags = " ".join(f"--secret {name}" for name in names)
        literals = " ".join(f'--from-literal={name}="${name}"' for name in names)
        note(sentence.format(names=", ".join(names), flags=flags, literals=literals, job=job_name(job.run_dir.name)))
    return names


def _mounts(request: ClusterOptions, job: Job, assumed: Assumptions) -> tuple[dict[str, str], ...]:
    mounts = tuple(_parts("--mount", text) for text in request.mount)
    plan, run_dir = job.plan.absolute(), job.run_dir
    if not any(plan.is_relative_to(mount["path"]) for mount in mounts):
        assumed.assume(str(plan), "in the image", "no --mount CLAIM:PATH covers it")
    if not any(run_dir.is_relative_to(mount["path"]) for mount in mounts):
        assumed.warn(
            f"no --mount CLAIM:PATH covers {run_dir}: checkpoints, metrics and logs are lost with their pod; mount a "
            "volume there, or name a --run-dir on one"
        )
    return mounts
