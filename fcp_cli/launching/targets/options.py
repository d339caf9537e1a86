"""Completes a job for a cluster with the options that were typed, and records its assumptions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fcp_cli.console import Assumptions
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.launching.job.job import Cluster, Job
from fcp_cli.launching.job.nodes import THIS_MACHINE, planned_cluster
from fcp_cli.launching.request import LOCAL, ClusterOptions
from fcp_cli.launching.targets.catalog import ALSO_CALLED, TARGETS, Target, target_of
from fcp_cli.launching.targets.values import job_name
from fcp_cli.machine.devices import UNKNOWN_MACHINE, LocalDevices
from fcp_cli.machine.network import is_host, is_loopback
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.reading.documents import read_text
from fcp_cli.runs.submission import LABEL, MOST_NAME, SUBDOMAIN

_DECISIVE = {"hostfile": "scripts", "sbatch_option": "slurm", "srun_option": "slurm", "image": "trainjob"}
"""Option -> the target that it implies without --target; other options fit several."""
_OF_ALL = frozenset({"template", "python", "env"})

_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kKMGTPE]i?)?")
_NAME = re.compile(SUBDOMAIN)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_ACCELERATOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_SAME_NAME = {"h100": "H100", "h200": "H200", "b200": "B200"}
_ACCELERATORS = {
    "skypilot": {"a100": "A100-80GB", "a100-40gb": "A100", **_SAME_NAME},
    "dstack": {"a100": "A100:80GB", "a100-40gb": "A100:40GB", **_SAME_NAME},
}
_SSH_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[A-Za-z0-9._-]+")
_MEMORY_SIZE = re.compile(r"[1-9][0-9]*([KMGT]i?)?")


def choose_target(request: ClusterOptions) -> str:
    """Return the target that was named, or that an option belongs to; else `local`."""
    meant = next((target for name, target in _DECISIVE.items() if getattr(request, name)), LOCAL)
    target = ALSO_CALLED.get(request.target or "", request.target or meant)
    takes = frozenset[str]() if target == LOCAL else target_of(target).options | _OF_ALL
    for name in (field.name for field in fields(ClusterOptions) if field.name != "target"):
        if getattr(request, name) and name not in takes:
            targets = [one for one, own in TARGETS.items() if name in own.options | _OF_ALL]
            raise UsageError(f"--{name.replace('_', '-')} is for --target {' or '.join(targets)}, not for {target}")
    return target


def refuse_local_options(target: str, *, node_rank: int | None, master_addr: str | None) -> None:
    """Refuse options that would do nothing: they are a misunderstanding."""
    given = {"--node-rank": node_rank, "--master-addr": master_addr}
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"{flag} is for --target {LOCAL}; under {target} every node finds it by itself")


def hosts_of(request: ClusterOptions, num_nodes: int | None) -> tuple[str, ...]:
    """Return the nodes that were listed; empty if none were."""
    if request.hostfile is None:
        return ()
    hosts = read_hostfile(request.hostfile)
    if num_nodes is not None and num_nodes != len(hosts):
        raise UsageError(f"{request.hostfile} lists {len(hosts)} hosts, but --nodes is {num_nodes}")
    return hosts


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Return the nodes of a file as MindSpeed's scripts and DeepSpeed have it, node 0 first.

    They are names or addresses, one a line, without their attributes (`slots=8`) and without `#` lines.
    """
    lines = read_text(path, error=UsageError, label="the hostfile ").splitlines()
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        host = (line.split("#")[0].split() or [""])[0]
        if not host:
            continue
        user, at, machine = host.rpartition("@")
        # ssh would take -oProxyCommand=... for an option.
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
    """Return the machines that the job will run on, of which only the kind of device is known here.

    Args:
        device: the device, as given; `auto` takes that of the cluster that the plan was made for.
        metadata: the metadata of the plan.
        find_machine: inspects this machine, if the plan was made for it.
        assumed: receives the choices.
    """
    if device == "auto":
        cluster = planned_cluster(metadata)
        device = find_machine().device if cluster == THIS_MACHINE else _device_kind(cluster)
        assumed.assume("--device", device, f"the plan's cost profile is of {cluster or 'an unknown cluster'}")
    return replace(UNKNOWN_MACHINE, device=device)


def _device_kind(cluster: str) -> str:
    """`npu` for clusters of Ascend devices, else `cuda`: schedulers hand out accelerators of one of the two kinds."""
    from fcp_cli.models.cluster import load_cluster

    try:
        return "npu" if "ascend" in load_cluster(cluster).device.lower() else "cuda"
    except ProfileError:
        return "npu" if "ascend" in cluster.lower() else "cuda"


def for_cluster(request: ClusterOptions, job: Job, assumed: Assumptions) -> Job:
    """Complete a job that was resolved as if it ran here with everything that the templates of its target need.

    Variables that the user has set here are set on the nodes, too.
    """
    target = target_of(job.target)
    if target.is_container and request.image is None:
        raise UsageError("containers need --image: the name of one with fcp, torch and your code")
    if request.image is not None and not _IMAGE.fullmatch(request.image or ""):
        raise UsageError(f"--image is {request.image!r}; it must be the name of an image, as registry/team/fcp:1.0")
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
            namespace=_namespace(request.namespace) if request.namespace else "",
            values=option_values(request, target, job, assumed),
        ),
    )


def option_values(request: ClusterOptions, target: Target, job: Job, assumed: Assumptions) -> dict[str, Any]:
    """Return the variables of templates that options set, by the names in docs/reference/templates.md."""
    rdma_resource, rdma_count = _rdma(request.rdma_resource)
    return {
        "setup": request.setup,
        "sbatch_options": [_option_of("sbatch", text) for text in request.sbatch_option],
        "srun_options": [_option_of("srun", text) for text in request.srun_option],
        "accelerator": _accelerator(request.accelerator, job),
        "image": request.image or "",
        "mounts": _mounts(request, job, assumed) if "mount" in target.options else [],
        "requests": _pairs("--request", request.request, "cpu=32", _QUANTITY),
        "node_selector": _pairs("--node-selector", request.node_selector, "gpu-type=h100", _LABEL),
        "tolerations": list(map(_toleration, request.toleration)),
        "secrets": list(map(_secret, request.env_secret)),
        "pull_secrets": [_name("--pull-secret", name) for name in request.pull_secret],
        "rdma_resource": rdma_resource,
        "rdma_count": rdma_count,
        "host_network": request.host_network,
        "shared_memory": _memory_size(request.shm_size),
    }


def _python(request: ClusterOptions, *, is_container: bool, assumed: Assumptions) -> str:
    if request.python is not None or is_container:
        return request.python or "python"
    assumed.assume("--python", sys.executable, "it must be there on every node")
    return sys.executable


def _accelerator(given: str | None, job: Job) -> str:
    """Return the accelerator of a node as the target names it; "" on CPUs and if the target needs no name."""
    names = _ACCELERATORS.get(job.target)
    if names is None or job.stack == "cpu":
        return ""
    if given is not None:
        if not _ACCELERATOR.fullmatch(given):
            raise UsageError(f"--accelerator is {given!r}; it must be a name, as H100")
        return given
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


def _rdma(text: str | None) -> tuple[str, int]:
    """Return the name of a resource and how many of it a node gets."""
    if text is None:
        return "", 1
    name, _, count = text.partition("=")
    if not _RESOURCE.fullmatch(name) or not (count or "1").isdecimal() or int(count or 1) < 1:
        raise UsageError(
            f"--rdma-resource is {text!r}; it must be a resource of the nodes and how many of it, as rdma/hca=1 or "
            "nvidia.com/hostdev=8: kubectl describe node shows them"
        )
    return name, int(count or 1)


def _pairs(flag: str, given: tuple[str, ...], example: str, value: re.Pattern[str]) -> dict[str, str]:
    """Return names and values that were given as NAME=VALUE."""
    found = {}
    for text in given:
        name, equals, amount = text.partition("=")
        if not equals or not _LABEL.fullmatch(name) or not value.fullmatch(amount):
            raise UsageError(f"{flag} is {text!r}; it must be a name and a value as Kubernetes writes them: {example}")
        found[name] = amount
    return found


def _variable(flag: str, text: str, example: str) -> tuple[str, str | None]:
    """Return name and value of NAME[=VALUE]."""
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
    example = "WANDB_API_KEY=wandb:token"
    name, value = _variable("--env-secret", text, example)
    secret, colon, key = (value or "").partition(":")
    if not colon or not _NAME.fullmatch(secret) or not _SECRET_KEY.fullmatch(key):
        raise UsageError(f"--env-secret is {text!r}; it must be NAME=SECRET:KEY, as {example}")
    return {"variable": name, "secret": secret, "key": key}


def _toleration(text: str) -> dict[str, str]:
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    is_effect = effect in _EFFECTS if colon else True
    if not _LABEL.fullmatch(key) or not is_effect or (equals and not _LABEL_VALUE.fullmatch(value)):
        raise UsageError(
            f"--toleration is {text!r}; it must be KEY[=VALUE][:EFFECT] with one of {', '.join(_EFFECTS)}, as "
            "nvidia.com/gpu:NoSchedule"
        )
    return {"key": key, "value": value, "effect": effect}


def _name(flag: str, text: str) -> str:
    if len(text) > MOST_NAME or not _NAME.fullmatch(text):
        raise UsageError(f"{flag} is {text!r}; it must be a name of Kubernetes: lower-case letters, digits and dashes")
    return text


def _namespace(text: str) -> str:
    if not re.fullmatch(LABEL, text):
        raise UsageError(f"--namespace is {text!r}; it must be a namespace: lower-case letters, digits and dashes")
    return text


def _memory_size(text: str | None) -> str:
    if text is not None and not _MEMORY_SIZE.fullmatch(text):
        raise UsageError(f"--shm-size is {text!r}; it must be a size as Kubernetes writes it, like 64Gi")
    return text or ""


def _mounts(request: ClusterOptions, job: Job, assumed: Assumptions) -> tuple[dict[str, str], ...]:
    mounts = tuple(map(_mount, request.mount))
    plan, run_dir = job.plan.absolute(), job.run_dir
    if not any(plan.is_relative_to(mount["path"]) for mount in mounts):
        assumed.assume(str(plan), "in the image", "no --mount CLAIM:PATH covers it")
    if not any(run_dir.is_relative_to(mount["path"]) for mount in mounts):
        assumed.warn(
            f"no --mount CLAIM:PATH covers {run_dir}: checkpoints, metrics and logs are lost with their pod; mount a "
            "volume there, or name a --run-dir on one"
        )
    return mounts


def _mount(text: str) -> dict[str, str]:
    claim, colon, path = text.partition(":")
    if not _NAME.fullmatch(claim) or not colon or not path.startswith("/") or len(path.splitlines()) != 1:
        raise UsageError(f"--mount is {text!r}; it must be CLAIM:/path, a persistent volume claim and its mount path")
    return {"claim": claim, "path": path}
