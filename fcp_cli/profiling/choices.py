"""What `fcp profile` does about everything that was not said: chooses, and says what and why."""

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
from fcp_cli.profiling.measure import MeasureSettings, default_degrees, default_layers, default_vision_layers
from fcp_cli.profiling.options import ProfileRequest

_CPU_MODEL, _MODEL = "qwen3-tiny", "qwen3-8b"
_CPU_MAX_LENGTH, _MAX_LENGTH = 4096, 131_072
_SMALL_MODEL_PARAMETERS = 1e8  # measured within a minute on a CPU


def computed_profile(job: ProfileRequest, origins: Origins) -> CostProfile:
    """Compute the profile of a model on a cluster; what was assumed goes into `origins`.

    Raises:
        UsageError: a cut that the model does not allow.
        ProfileError: unknown model or cluster.
    """
    spec, where = load_model(job.model or _MODEL), load_cluster(job.cluster or EXAMPLE_CLUSTER)
    _assume(origins, "--model", job.model, spec.name, "--model or --hf-config sets it")
    _assume(origins, "--cluster", job.cluster, where.name, "--cluster sets it")
    ranks = job.ranks or max(1, where.num_devices // (job.tensor_parallel * job.pipeline_parallel))
    _assume(origins, "--ranks", job.ranks, ranks, "all devices of the cluster")
    parallelism = Parallelism(
        ranks=ranks,
        tensor_parallel=job.tensor_parallel,
        pipeline_parallel=job.pipeline_parallel,
        zero_stage=_zero_stage(spec, where, job, ranks, origins),
        recompute="full" if job.recompute else "none",
        freeze_vision=job.freeze_vision,
    )
    if spec.vision is not None and not job.freeze_vision:
        origins.assume("vision encoder", "trained", "--freeze-vision leaves it as it is")
    origins.assume("precision", job.precision, "--precision sets it")
    efficiency = f"{where.linear_efficiency:.0%} of {where.peak_flops / 1e12:g} TFLOP/s, attention "
    origins.assume("efficiency", efficiency + f"{where.attention_efficiency:.0%}", f"as {where.name} says")
    return analytic_profile(spec, where, precision=PRECISIONS[job.precision], parallelism=parallelism)


def _zero_stage(spec: ModelSpec, where: ClusterSpec, job: ProfileRequest, ranks: int, origins: Origins) -> int:
    if job.zero is not None:
        return job.zero
    stage = choose_zero_stage(
        spec,
        PRECISIONS[job.precision],
        ranks=ranks,
        device_bytes=where.memory_bytes,
        tensor_parallel=job.tensor_parallel,
        pipeline_parallel=job.pipeline_parallel,
    )
    origins.assume("--zero", stage, "the least stage that leaves half of the memory to activations")
    return stage


def choose_measurement(choice: ProfileRequest, origins: Origins) -> MeasureSettings:
    """What to measure: what was said, else what suits this machine; what was assumed goes into `origins`.

    Raises:
        UsageError: options that contradict each other or this machine.
        ProfileError: unknown model or cluster, or torch and transformers are not installed.
        RunError: torch does not import, or there is no such device.
    """
    kind, units = _units(choice, origins)
    on_cpu = kind == "cpu"
    spec = load_model(choice.model or (_CPU_MODEL if on_cpu else _MODEL))
    _assume(origins, "--model", choice.model, spec.name, "small enough for a CPU" if on_cpu else "--model sets it")
    if choice.freeze_vision and spec.vision is None:
        raise UsageError(f"--freeze-vision: {spec.name} has no vision encoder")
    device = None if on_cpu or choice.nodes > 1 else _device(kind)
    cluster = choice.cluster or ("this-machine" if on_cpu else _cluster_like(device))
    if not on_cpu:
        _assume(origins, "--cluster", choice.cluster, cluster, "its bandwidths stand in for what is not measured")
    ranks = choice.ranks or units
    if choice.nodes == 1:
        _assume(origins, "--ranks", choice.ranks, ranks, "one per core" if on_cpu else "one per device")
    if on_cpu and choice.nodes == 1 and ranks > units:
        origins.assume("times", f"{ranks} ranks sharing {units} cores", "as a job of so many ranks here sees them")
    degrees = choice.degrees or default_degrees(ranks)
    if max(degrees) > ranks > 1:
        raise UsageError(f"--degrees {max(degrees)} needs as many ranks; {ranks} are measured (--ranks 1 emulates)")
    _assume(origins, "--degrees", choice.degrees, ",".join(map(str, degrees)), f"{ranks} ranks")
    max_length = choice.max_length or (_CPU_MAX_LENGTH if on_cpu else _MAX_LENGTH)
    _assume(origins, "--max-length", choice.max_length, max_length, "tokens")
    small = on_cpu and spec.parameters < _SMALL_MODEL_PARAMETERS
    minutes = choice.budget_minutes or (1.0 if small else 10.0)
    _assume(origins, "--budget-minutes", choice.budget_minutes, f"{minutes:g}", "longer is more exact")
    memory_bytes = host_memory_bytes() / ranks if on_cpu else load_cluster(cluster).memory_bytes
    if device is not None:
        memory_bytes = device.memory_bytes
    layers = _layers(choice, spec) or default_layers(spec, device=kind, memory_bytes=memory_bytes)
    return MeasureSettings(
        model=choice.model or spec.name,
        cluster=cluster,
        ranks=ranks,
        nodes=choice.nodes,
        degrees=degrees,
        max_length=max_length,
        device=kind,
        dtype=choice.dtype if choice.dtype != "auto" else "float32" if on_cpu else "bfloat16",
        layers=layers,
        vision_layers=default_vision_layers(spec, layers, device=kind),
        budget_seconds=60.0 * minutes,
        samples=choice.samples or Path("profile.samples.jsonl"),
    )


def _units(choice: ProfileRequest, origins: Origins) -> tuple[str, int]:
    """The kind of device to measure on, and how many ranks that gives."""
    if choice.nodes > 1:  # the nodes are elsewhere: only what was said is known of them
        return choice.device, choice.nodes * choice.devices_per_node
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ProfileError(
                f"measuring needs {package}, which is not installed; run: pip install 'fcp-cli[hf]', or use --analytic"
            )
    machine = find_machine(choice.device)
    origins.assume("device", machine.describe(), "what this machine has" if choice.device == "auto" else "--device")
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
    """The shipped cluster of such accelerators, else the example."""
    known = {"H200": "h200-8x8", "H100": "h100-8x8", "A100": "a100-8x8"}
    known |= {"910B": "ascend910b-8x8", "910C": "ascend910c-4x16", "910_93": "ascend910c-4x16"}
    name = device.name.upper() if device is not None else ""
    return next((cluster for part, cluster in known.items() if part in name), EXAMPLE_CLUSTER)


def _layers(choice: ProfileRequest, spec: ModelSpec) -> tuple[int, ...]:
    counts = choice.layers
    whole = counts == (spec.num_layers,)
    if counts and not whole and (len(counts) != 2 or max(counts) > spec.num_layers):
        said = ",".join(map(str, counts))
        raise UsageError(f"--layers {said} must be two counts up to {spec.num_layers}, as 1,2, or {spec.num_layers}")
    return counts


def _assume(origins: Origins, name: str, given: object, value: object, reason: str) -> None:
    if not given:
        origins.assume(name, value, reason)
