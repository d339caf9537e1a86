"""Chooses model, cluster, ranks, degrees and layers where `fcp profile` was given none, each with its reason."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.console import Origins
from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.machine.devices import find_machine
from fcp_cli.machine.host import host_memory_bytes
from fcp_cli.models.cluster import ClusterSpec, load_cluster
from fcp_cli.models.memory import PRECISIONS, Parallelism, choose_zero_stage
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.models.shipped import EXAMPLE_CLUSTER
from fcp_cli.profiling.analytic import analytic_profile
from fcp_cli.profiling.measurement import Measurement, default_degrees, default_layers, default_vision_layers
from fcp_cli.profiling.options import ProfileRequest

_CPU_MODEL, _MODEL = "qwen3-tiny", "qwen3-8b"
_CPU_MAX_LENGTH, _MAX_LENGTH = 4096, 131_072
_SMALL_MODEL_PARAMETERS = 1e8  # measured within a minute on a CPU


def computed_profile(request: ProfileRequest, origins: Origins) -> CostProfile:
    """Return the analytic profile of a model on a cluster; what was assumed goes into `origins`.

    Raises:
        UsageError: a cut that the model does not allow.
        ProfileError: unknown model or cluster.
    """
    spec, cluster = load_model(request.model or _MODEL), load_cluster(request.cluster or EXAMPLE_CLUSTER)
    _assume(origins, "--model", request.model, spec.name, "--model or --hf-config sets it")
    _assume(origins, "--cluster", request.cluster, cluster.name, "--cluster sets it")
    ranks = request.ranks or max(1, cluster.num_devices // (request.tensor_parallel * request.pipeline_parallel))
    _assume(origins, "--ranks", request.ranks, ranks, "all devices of the cluster")
    parallelism = Parallelism(
        ranks=ranks,
        tensor_parallel=request.tensor_parallel,
        pipeline_parallel=request.pipeline_parallel,
        zero_stage=_zero_stage(spec, cluster, request, ranks, origins),
        recompute="full" if request.recompute else "none",
        freeze_vision=request.freeze_vision,
    )
    if spec.vision is not None and not request.freeze_vision:
        origins.assume("vision encoder", "trained", "--freeze-vision leaves it as it is")
    origins.assume("precision", request.precision, "--precision sets it")
    efficiency = f"{cluster.linear_efficiency:.0%} of {cluster.peak_flops / 1e12:g} TFLOP/s, attention "
    origins.assume("efficiency", efficiency + f"{cluster.attention_efficiency:.0%}", f"from {cluster.name}")
    return analytic_profile(spec, cluster, precision=PRECISIONS[request.precision], parallelism=parallelism)


def _zero_stage(spec: ModelSpec, cluster: ClusterSpec, request: ProfileRequest, ranks: int, origins: Origins) -> int:
    if request.zero is not None:
        return request.zero
    stage = choose_zero_stage(
        spec,
        PRECISIONS[request.precision],
        ranks=ranks,
        device_bytes=cluster.memory_bytes,
        tensor_parallel=request.tensor_parallel,
        pipeline_parallel=request.pipeline_parallel,
    )
    origins.assume("--zero", stage, "the least stage that leaves half of the memory to activations")
    return stage


def choose_measurement(request: ProfileRequest, origins: Origins) -> Measurement:
    """Return what to measure: what was asked for, else what suits this machine; what was assumed goes into `origins`.

    Raises:
        UsageError: options that contradict each other or this machine.
        ProfileError: unknown model or cluster, or torch and transformers are not installed.
        RunError: torch does not import, or there is no such device.
    """
    kind, units = _units(request, origins)
    on_cpu = kind == "cpu"
    spec = load_model(request.model or (_CPU_MODEL if on_cpu else _MODEL))
    _assume(origins, "--model", request.model, spec.name, "small enough for a CPU" if on_cpu else "--model sets it")
    if request.freeze_vision and spec.vision is None:
        raise UsageError(f"--freeze-vision: {spec.name} has no vision encoder")
    device = None if on_cpu or request.nodes > 1 else _device(kind)
    cluster = request.cluster or ("this-machine" if on_cpu else _cluster_like(device))
    if not on_cpu:
        _assume(origins, "--cluster", request.cluster, cluster, "its bandwidths stand in for what is not measured")
    ranks = request.ranks or units
    if request.nodes == 1:
        _assume(origins, "--ranks", request.ranks, ranks, "one per core" if on_cpu else "one per device")
    if on_cpu and request.nodes == 1 and ranks > units:
        origins.assume("times", f"{ranks} ranks sharing {units} cores", "as a job of so many ranks here sees them")
    degrees = request.degrees or default_degrees(ranks)
    if max(degrees) > ranks > 1:
        raise UsageError(f"--degrees {max(degrees)} needs as many ranks; {ranks} are measured (--ranks 1 emulates)")
    _assume(origins, "--degrees", request.degrees, ",".join(map(str, degrees)), f"{ranks} ranks")
    max_length = request.max_length or (_CPU_MAX_LENGTH if on_cpu else _MAX_LENGTH)
    _assume(origins, "--max-length", request.max_length, max_length, "tokens")
    minutes = request.budget_minutes or (1.0 if on_cpu and spec.parameters < _SMALL_MODEL_PARAMETERS else 10.0)
    _assume(origins, "--budget-minutes", request.budget_minutes, f"{minutes:g}", "longer is more exact")
    memory_bytes = host_memory_bytes() / ranks if on_cpu else load_cluster(cluster).memory_bytes
    if device is not None:
        memory_bytes = device.memory_bytes
    layers = _layers(request, spec) or default_layers(spec, device=kind, memory_bytes=memory_bytes)
    return Measurement(
        model=request.model or spec.name,
        cluster=cluster,
        ranks=ranks,
        nodes=request.nodes,
        degrees=degrees,
        max_length=max_length,
        device=kind,
        dtype=request.dtype if request.dtype != "auto" else "float32" if on_cpu else "bfloat16",
        layers=layers,
        vision_layers=default_vision_layers(spec, layers, device=kind),
        budget_seconds=60.0 * minutes,
        samples=request.samples or Path("profile.samples.jsonl"),
    )


def _units(request: ProfileRequest, origins: Origins) -> tuple[str, int]:
    """Return the kind of device to measure on, and how many ranks that gives."""
    if request.nodes > 1:  # the nodes are elsewhere: they may have other devices than this machine
        return request.device, request.nodes * request.devices_per_node
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ProfileError(
                f"measuring needs {package}, which is not installed; run: pip install 'fcp-cli[hf]', or use --analytic"
            )
    machine = find_machine(request.device)
    origins.assume("device", machine.describe(), "what this machine has" if request.device == "auto" else "--device")
    return machine.device, machine.num_cores if machine.device == "cpu" else machine.num_devices


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    name: str
    memory_bytes: float


def _device(kind: str) -> _Device:
    import torch

    from fcp_cli.profiling.device import device_memory_bytes, device_name

    first = torch.device(kind, 0)
    return _Device(name=device_name(first), memory_bytes=device_memory_bytes(first, ranks_on_host=1))


def _cluster_like(device: _Device | None) -> str:
    """Return the shipped cluster of such accelerators, else the example."""
    known = {"H200": "h200-8x8", "H100": "h100-8x8", "A100": "a100-8x8"}
    known |= {"910B": "ascend910b-8x8", "910C": "ascend910c-4x16", "910_93": "ascend910c-4x16"}
    name = device.name.upper() if device is not None else ""
    return next((cluster for part, cluster in known.items() if part in name), EXAMPLE_CLUSTER)


def _layers(request: ProfileRequest, spec: ModelSpec) -> tuple[int, ...]:
    counts = request.layers
    if counts and counts != (spec.num_layers,) and (len(counts) != 2 or max(counts) > spec.num_layers):
        given = ",".join(map(str, counts))
        raise UsageError(f"--layers {given} must be two counts up to {spec.num_layers}, as 1,2, or {spec.num_layers}")
    return counts


def _assume(origins: Origins, name: str, given: object, value: object, reason: str) -> None:
    if not given:
        origins.assume(name, value, reason)
