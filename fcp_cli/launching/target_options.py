"""Completes a cluster job from options, and records assumptions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.launching.job import THIS_MACHINE, Cluster, Job, planned_cluster
from fcp_cli.launching.request import LOCAL, ClusterOptions
from fcp_cli.launching.targets import ALSO_CALLED, TARGETS, Target, job_name, target_of
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.util.console import Assumptions
from fcp_cli.util.inputs import read_text
from fcp_cli.util.machine import UNKNOWN_MACHINE, LocalDevices
from fcp_cli.util.network import is_host, is_loopback

_DECISIVE = {"hostfile": "scripts", "sbatch_option": "slurm", "srun_option": "slurm", "image": "trainjob"}
"""Option -> target that it implies without --target; other options fit several targets."""
_OF_ALL = frozenset({"template", "python", "env"})

# Kubernetes names (RFC 1123).
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_MOST_NAME = 253
_KEY = r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_VALUE = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[kKMGTPE]i?)?"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_SHAPES = {
    "--image": (r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "the name of an image, as registry/team/fcp:1.0"),
    "--accelerator": (r"[A-Za-z0-9][A-Za-z0-9._:-]*", "a name, as H100"),
    "--rdma-resource": (
        rf"(?P<name>[a-z0-9]([a-z0-9.-]*[a-z0-9])?/{_VALUE})(=(?P<count>0*[1-9][0-9]*)?)?",
        "a resource of the nodes and how many of it, as rdma/hca=1 or nvidia.com/hostdev=8: kubectl describe node "
        "shows them",
    ),
    "--request": (
        rf"(?P<name>{_KEY})=(?P<value>{_QUANTITY})",
        "a name and a value as Kubernetes writes them: cpu=32",
    ),
    "--node-selector": (
        rf"(?P<name>{_KEY})=(?P<value>{_KEY})",
        "a name and a value as Kubernetes writes them: gpu-type=h100",
    ),
    "--toleration": (
        rf"(?P<key>{_KEY})(=(?P<value>{_VALUE}))?(:(?P<effect>{'|'.join(_EFFECTS)}))?",
        f"KEY[=VALUE][:EFFECT] with one of {', '.join(_EFFECTS)}, as nvidia.com/gpu:NoSchedule",
    ),
    "--env-secret": (
        rf"(?P<variable>[^=]*)=(?P<secret>{_SUBDOMAIN}):(?P<key>[A-Za-z0-9._-]+)",
        "NAME=SECRET:KEY, as WANDB_API_KEY=wandb:token",
    ),
    "--pull-secret": (
        rf"(?=.{{1,{_MOST_NAME}}}\Z){_SUBDOMAIN}",
        "a name of Kubernetes: lower-case letters, digits and dashes",
    ),
    "--namespace": (_LABEL, "a namespace: lower-case letters, digits and dashes"),
    "--shm-size": (r"[1-9][0-9]*([KMGT]i?)?", "a size as Kubernetes writes it, like 64Gi"),
    "--mount": (
        rf"(?P<claim>{_SUBDOMAIN}):(?P<path>/[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*)",
        "CLAIM:/path, a persistent volume claim and its mount path",
    ),
}
"""Option -> pattern of its values, whose groups are passed to templates, and its description in messages."""
_SAME_NAME = {"h100": "H100", "h200": "H200", "b200": "B200"}
_ACCELERATORS = {
    "skypilot": {"a100": "A100-80GB", "a100-40gb": "A100", **_SAME_NAME},
    "dstack": {"a100": "A100:80GB", "a100-40gb": "A100:40GB", **_SAME_NAME},
}
_SSH_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    if device == "auto":
        cluster = planned_cluster(metadata)
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


def for_cluster(request: ClusterOptions, job: Job, assumed: Assumptions) -> Job:
    """Complete a resolved job with the fields that its target's templates need.

    Communication variables that the user has exported here are also set on the nodes.
    """
    target = target_of(job.target)
    if target.is_container and request.image is None:
        raise UsageError("containers need --image: the name of one with fcp, torch and your code")
    if request.image is not None:
        _parts("--image", request.image)
    hosts = job.hosts
    if job.target == "scripts" and not hosts:
        hosts = tuple(f"node{k}" for k in range(job.num_nodes))
        assumed.assume("--hostfile", f"{hosts[0]} to {hosts[-1]}", "names to replace by those of your nodes")
    return replace(
        job,
        python=_python(request, is_container=request.image is not None, assumed=assumed),
        environment={
            **job.environment,
            **{v.name: v.value for v in job.variables if v.value},
            **_given(request.env, os.environ),
        },
        hosts=hosts,
        master_addr=hosts[0] if hosts else job.master_addr,
        cluster=Cluster(
            name=job_name(request.job_name or job.run_dir.name),
            directory=Path.cwd(),
            interface_variables=tuple(v.name for v in job.variables if not v.value),
            namespace=_checked("--namespace", request.namespace or None),
            values=option_values(request, target, job, assumed),
        ),
    )


def option_values(request: ClusterOptions, target: Target, job: Job, assumed: Assumptions) -> dict[str, Any]:
    """Return template variables set by options; see docs/reference/templates.md."""
    rdma = {} if request.rdma_resource is None else _parts("--rdma-resource", request.rdma_resource)
    return {
        "setup": request.setup,
        "sbatch_options": [_option_of("sbatch", text) for text in request.sbatch_option],
        "srun_options": [_option_of("srun", text) for text in request.srun_option],
        "accelerator": _accelerator(request.accelerator, job),
        "image": request.image or "",
        "mounts": _mounts(request, job, assumed) if "mount" in target.options else [],
        "requests": _pairs("--request", request.request),
        "node_selector": _pairs("--node-selector", request.node_selector),
        "tolerations": [_parts("--toleration", text) for text in request.toleration],
        "secrets": list(map(_secret, request.env_secret)),
        "pull_secrets": [_checked("--pull-secret", name) for name in request.pull_secret],
        "rdma_resource": rdma.get("name", ""),
        "rdma_count": int(rdma.get("count") or 1),
        "host_network": request.host_network,
        "shared_memory": _checked("--shm-size", request.shm_size),
    }


def _python(request: ClusterOptions, *, is_container: bool, assumed: Assumptions) -> str:
    if request.python is not None or is_container:
        return request.python or "python"
    assumed.assume("--python", sys.executable, "it must be there on every node")
    return sys.executable


def _accelerator(given: str | None, job: Job) -> str:
    """Return the accelerator's name in SkyPilot or dstack; "" on CPUs and for other targets."""
    names = _ACCELERATORS.get(job.target)
    if names is None or job.stack == "cpu":
        return ""
    if given is not None:
        return _checked("--accelerator", given)
    device = planned_cluster(job.metadata).rpartition("-")[0]
    if device not in names:
        raise UsageError(
            f"--target {job.target} needs --accelerator: its name of the nodes' devices, as H100, which the plan's "
            f"cluster {planned_cluster(job.metadata) or '(unknown)'} does not tell"
        )
    return names[device]


def _option_of(program: str, text: str) -> str:
    option = text.removeprefix("#SBATCH").strip()
    if not option.startswith("-") or len(option.splitlines()) != 1:
        example = {"sbatch": "--partition=gpu", "srun": "--container-image=/images/fcp.sqsh"}[program]
        raise UsageError(
            f"--{program}-option {text!r} is not one option of {program}; give it as --{program}-option={example}"
        )
    return option


def _parts(flag: str, text: str) -> dict[str, str]:
    """Parse an option's value by its pattern in `_SHAPES`; return the named groups, "" for missing ones."""
    pattern, wanted = _SHAPES[flag]
    found = re.fullmatch(pattern, text)
    if found is None:
        raise UsageError(f"{flag} is {text!r}; it must be {wanted}")
    return found.groupdict(default="")


def _checked(flag: str, text: str | None) -> str:
    """Return the validated value of a single-part option; "" for None."""
    if text is not None:
        _parts(flag, text)
    return text or ""


def _pairs(flag: str, given: tuple[str, ...]) -> dict[str, str]:
    """Parse repeated NAME=VALUE options."""
    return {found["name"]: found["value"] for found in (_parts(flag, text) for text in given)}


def _variable(flag: str, text: str, example: str) -> tuple[str, str | None]:
    """Parse NAME[=VALUE]; the value is None if missing."""
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{flag} is {text!r}; it must be the name of a variable and a value, as {example}")
    if name.startswith("FCP_"):
        raise UsageError(f"{flag} {name}: fcp sets the variables FCP_... of its jobs by itself")
    return name, value if equals else None


def _given(words: tuple[str, ...], here: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for text in words:
        name, value = _variable("--env", text, "HF_HOME=/shared/hub")
        if value is None and name not in here:
            raise UsageError(f"--env {name} has no value, and {name} is not set here; give --env {name}=VALUE")
        found[name] = here[name] if value is None else value
    return found


def _secret(text: str) -> dict[str, str]:
    _variable("--env-secret", text, "WANDB_API_KEY=wandb:token")
    return _parts("--env-secret", text)


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
