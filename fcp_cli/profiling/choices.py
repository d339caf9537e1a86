"""Chooses model, cluster, ranks, degrees and layers not given to `fcp profile`, each with a reason."""

from __future__ import annotations

import importlib.util
import shlex
from dataclasses import replace
from pathlib import Path

from fcp_cli.cost.profile import CostProfile, Sync
from fcp_cli.cost.recipe import Recipe, RecipeRequest
from fcp_cli.errors import ProfileError, RunError, UsageError
from fcp_cli.memory.fitting import FittedRecipe, JobRanks, fitting_recipe
from fcp_cli.memory.items import RESERVE_FRACTION
from fcp_cli.models.cluster import DEFAULT_MODEL, EXAMPLE_CLUSTER, THIS_MACHINE, cluster_like, load_cluster
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.profiling.computed import analytic_profile, as_needed_profile
from fcp_cli.profiling.fits import place_of
from fcp_cli.profiling.options import ProfileRequest
from fcp_cli.profiling.samples import Measurement, default_degrees, default_vision_layers
from fcp_cli.profiling.worker import default_layers
from fcp_cli.util.console import Assumptions
from fcp_cli.util.machine import find_machine, host_memory_bytes
from fcp_cli.util.plugins import pip_install

_CPU_MODEL = "qwen3-tiny"
_CPU_MAX_LENGTH, _MAX_LENGTH = 4096, 131_072
_SMALL_MODEL_PARAMETERS = 1e8  # can be measured within a minute on a CPU


def computed_profile(request: ProfileRequest, assumptions: Assumptions) -> CostProfile:
    """Return the analytic profile of a model on a cluster; record assumptions."""
    if request.recipe.recompute == "as-needed" and request.pipeline_parallel > 1:
        raise UsageError(
            "--recompute as-needed makes each pipeline stage choose by its own memory, which one profile cannot "
            "describe; 'fcp plan' with the same options and no --profile computes it"
        )
    spec = load_model(request.model or DEFAULT_MODEL)
    cluster = load_cluster(request.cluster or EXAMPLE_CLUSTER).running(request.attention_kernel)
    _assume(assumptions, "--model", request.model, spec.name, "--model or --hf-config sets it")
    _assume(assumptions, "--cluster", request.cluster, cluster.name, "--cluster sets it")
    devices = request.tensor_parallel * request.pipeline_parallel
    ranks = request.ranks or max(1, cluster.num_devices // devices)
    _assume(assumptions, "--ranks", request.ranks, ranks, "all devices of the cluster")
    place = JobRanks(
        num_ranks=ranks,
        ranks_per_node=max(1, cluster.devices_per_node // devices),
        capacity_bytes=cluster.memory_bytes * (1 - RESERVE_FRACTION),
        tensor_parallel=request.tensor_parallel,
        pipeline_parallel=request.pipeline_parallel,
        expert_parallel=request.expert_parallel,
        on_cpu=cluster.is_host,
    )
    fit = _fit(spec, request, place, assumptions)
    _require_room(spec, request, place, fit)
    if spec.vision is not None and not request.recipe.freeze_vision:
        assumptions.assume("vision encoder", "trained", "--freeze-vision freezes it")
    rate, kernel = cluster.attention_rate, cluster.attention_kernel
    shares = sorted({rate.forward, rate.backward}, reverse=True)
    efficiency = f"{cluster.linear_efficiency:.0%} of {cluster.peak_flops / 1e12:g} TFLOP/s, attention "
    efficiency += " and ".join(f"{share:.0%}" for share in shares) + (f" ({kernel})" if kernel else "")
    assumptions.assume("efficiency", efficiency, f"from {cluster.name}")

    def profile_of(recipe: Recipe) -> CostProfile:
        return analytic_profile(
            spec, cluster, recipe=recipe, sync=fit.sync, ranks=ranks, cut=place.cut, peers=place.peers
        )

    return as_needed_profile(fit.recipe, fit.level_tokens, profile_of) if fit.level_tokens else profile_of(fit.recipe)


def asked_sync(request: ProfileRequest) -> Sync | None:
    """Return the requested sync, `microbatch` for ZeRO stage 3, or None for the job's default."""
    if request.sync != "auto":
        return request.sync
    return "microbatch" if request.recipe.zero == "3" else None


def _fit(spec: ModelSpec, request: ProfileRequest, place: JobRanks, assumptions: Assumptions) -> FittedRecipe:
    """Complete the requested recipe with settings that fit; `assumptions` records the choices."""
    sync = asked_sync(request)
    # A single rank represents those of a plan, which `fcp plan` makes for `iteration`.
    fit = fitting_recipe(spec, request.recipe, place, sync=sync or (None if place.num_ranks > 1 else "iteration"))
    room = f"leaves {fit.tokens:,} tokens per rank" if fit.tokens else "nothing fits"
    assumptions.assume("recipe", fit.recipe.describe(), f"{room}; {shlex.join(fit.recipe.flags())}")
    if sync is None:
        assumptions.assume("--sync", fit.sync, "fcp plan takes the same option")
    return fit


def _require_room(spec: ModelSpec, request: ProfileRequest, place: JobRanks, fit: FittedRecipe) -> None:
    if fit.tokens >= 1:
        return
    memory = fit.memory.as_profile_memory(place.capacity_bytes)
    other = fitting_recipe(spec, RecipeRequest.to_train_as(request.recipe), place)
    flags = shlex.join(other.flags())
    cuts = ["--tensor-parallel", "--pipeline-parallel", *(["--expert-parallel"] if spec.experts else [])]
    remedy = f"{flags} fits" if other.tokens >= 1 else f"raise {' or '.join(cuts)}"
    raise ProfileError(
        f"{spec.name} does not fit: it takes {memory.model_state_bytes / 1e9:.1f} of the "
        f"{place.capacity_bytes / 1e9:.1f} GB that a rank may use under {fit.recipe.describe()}; {remedy}"
    )


def choose_measurement(request: ProfileRequest, assumptions: Assumptions) -> Measurement:
    """Choose the measurement as requested or as suits this machine; record assumptions."""
    _require_one_level(request)
    kind, units = _units(request, assumptions)
    on_cpu = kind == "cpu"
    spec = load_model(request.model or (_CPU_MODEL if on_cpu else DEFAULT_MODEL))
    unmeasured = {
        "siglip": "takes images of a single size, so its time per patch cannot be measured",
        "gemma4": "takes images padded to one size, which cannot be measured",
    }
    if spec.vision is not None and spec.vision.kind in unmeasured:
        raise RunError(
            f"the encoder of {spec.name} {unmeasured[spec.vision.kind]}; compute a profile: "
            f"fcp profile --analytic --model {spec.name}"
        )
    _assume(assumptions, "--model", request.model, spec.name, "small enough for a CPU" if on_cpu else "--model sets it")
    device = None if on_cpu or request.nodes > 1 else _device(kind)
    cluster = request.cluster or (THIS_MACHINE if on_cpu else cluster_like(device[0] if device else ""))
    if not on_cpu:
        _assume(assumptions, "--cluster", request.cluster, cluster, "its bandwidths replace unmeasured ones")
    ranks = request.ranks or units
    if request.nodes == 1:
        _assume(assumptions, "--ranks", request.ranks, ranks, "one per core" if on_cpu else "one per device")
    if request.nodes > 1 and ranks != units:
        raise UsageError(
            f"--ranks {ranks}: {request.nodes} nodes of --devices-per-node {request.devices_per_node} have {units} "
            "ranks; remove --ranks, or give the devices of a node"
        )
    if on_cpu and request.nodes == 1 and ranks > units:
        assumptions.assume("times", f"{ranks} ranks sharing {units} cores", "as in a job with as many ranks here")
    degrees = request.degrees or default_degrees(ranks)
    if max(degrees) > ranks > 1:
        raise UsageError(f"--degrees {max(degrees)} needs as many ranks; {ranks} are measured (--ranks 1 emulates)")
    _assume(assumptions, "--degrees", request.degrees, ",".join(map(str, degrees)), f"{ranks} ranks")
    max_length = request.max_length or (_CPU_MAX_LENGTH if on_cpu else _MAX_LENGTH)
    _assume(assumptions, "--max-length", request.max_length, max_length, "tokens")
    minutes = request.budget_minutes or (1.0 if on_cpu and spec.parameters < _SMALL_MODEL_PARAMETERS else 10.0)
    _assume(assumptions, "--budget-minutes", request.budget_minutes, f"{minutes:g}", "longer is more exact")
    device_bytes = _device_bytes(kind, device, cluster, ranks)
    place = place_of(cluster, ranks=ranks, nodes=request.nodes, device_bytes=device_bytes, on_cpu=on_cpu)
    fit = _fit(spec, request, place, assumptions)
    # Packs are measured under this recipe; fits are scaled to the requested one.
    recipe = replace(fit.recipe, lora=None, freeze=None)
    layers = _layers(request, spec) or default_layers(spec, recipe, device=kind, device_bytes=device_bytes, ranks=ranks)
    return Measurement(
        model=request.model or spec.name,
        cluster=cluster,
        ranks=ranks,
        nodes=request.nodes,
        degrees=degrees,
        max_length=max_length,
        device=kind,
        recipe=recipe,
        sync=fit.sync,
        layers=layers,
        vision_layers=default_vision_layers(spec, layers, device=kind),
        budget_seconds=60.0 * minutes,
        samples=request.samples or Path("profile.samples.jsonl"),
    )


def _require_one_level(request: ProfileRequest) -> None:
    if request.recipe.recompute == "as-needed":
        raise UsageError(
            "--recompute as-needed mixes levels, and a measurement runs one; add --analytic, or measure one of them: "
            "--recompute none, activation, elementwise or selective"
        )


def _units(request: ProfileRequest, assumptions: Assumptions) -> tuple[str, int]:
    """Return the device kind to measure on, and the number of ranks on it."""
    if request.nodes > 1:  # the nodes may have other devices than this machine
        return request.device, request.nodes * request.devices_per_node
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ProfileError(
                f"measuring needs {package}, which is not installed; run: {pip_install('hf')}, or use --analytic"
            )
    machine = find_machine(request.device)
    assumptions.assume(
        "device", machine.describe(), "found on this machine" if request.device == "auto" else "--device"
    )
    return machine.device, machine.num_cores if machine.device == "cpu" else machine.num_devices


def _device(kind: str) -> tuple[str, float]:
    """Return the name and memory of this machine's first device."""
    import torch

    from fcp_cli.profiling.timing import device_memory_bytes, device_name

    first = torch.device(kind, 0)
    return device_name(first), device_memory_bytes(first, ranks_on_host=1)


def _device_bytes(kind: str, device: tuple[str, float] | None, cluster: str, ranks: int) -> float:
    """Return a rank's memory: of its device, its share of the host, or the cluster's device if nodes are remote."""
    if kind == "cpu":
        return host_memory_bytes() / ranks
    return load_cluster(cluster).memory_bytes if device is None else device[1]


def _layers(request: ProfileRequest, spec: ModelSpec) -> tuple[int, ...]:
    counts = request.layers
    if counts and counts != (spec.num_layers,) and (len(counts) != 2 or max(counts) > spec.num_layers):
        given = ",".join(map(str, counts))
        raise UsageError(f"--layers {given} must be two counts up to {spec.num_layers}, as 1,2, or {spec.num_layers}")
    return counts


def _assume(assumptions: Assumptions, name: str, given: object, value: object, reason: str) -> None:
    if not given:
        assumptions.assume(name, value, reason)
