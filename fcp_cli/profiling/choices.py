"""Chooses model, cluster, ranks, degrees and layers not given to `fcp profile`, each with a reason."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
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
from fcp_cli.profiling.points import LEAST_LENGTH, Footprint
from fcp_cli.profiling.samples import Measurement
from fcp_cli.util.console import Assumptions
from fcp_cli.util.machine import find_machine, host_memory_bytes
from fcp_cli.util.plugins import pip_install

_CPU_MODEL = "qwen3-tiny"
_CPU_MAX_LENGTH, _MAX_LENGTH = 4096, 131_072
_DEVICES_PER_NODE = 8  # if there are several nodes, which this machine cannot ask
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


def _fit(spec: ModelSpec, request: ProfileRequest, place: JobRanks, assumptions: Assumptions) -> FittedRecipe:
    """Complete the requested recipe with settings that fit; `assumptions` records the choices."""
    # A single rank represents those of a plan, which `fcp plan` makes for `iteration`.
    alone: Sync | None = "iteration" if place.num_ranks == 1 else None
    sync = "microbatch" if request.recipe.zero == "3" else alone
    fit = fitting_recipe(spec, request.recipe, place, sync=sync)
    room = f"leaves {fit.tokens:,} tokens per rank" if fit.tokens else "nothing fits"
    assumptions.assume("recipe", fit.recipe.describe(), f"{room}; {shlex.join(fit.recipe.flags())}")
    if request.recipe.zero != "3":
        assumptions.assume("--sync", fit.sync, "an option of fcp plan")
    return fit


def _require_room(spec: ModelSpec, request: ProfileRequest, place: JobRanks, fit: FittedRecipe) -> None:
    if fit.tokens >= 1:
        return
    memory = fit.memory.as_profile_memory(place.capacity_bytes)
    other = fitting_recipe(spec, RecipeRequest.to_train_as(request.recipe), place)
    flags = shlex.join(other.recipe.flags())
    cuts = ["--tensor-parallel", "--pipeline-parallel", *(["--expert-parallel"] if spec.experts else [])]
    remedy = f"{flags} fits" if other.tokens >= 1 else f"raise {' or '.join(cuts)}"
    raise ProfileError(
        f"{spec.name} does not fit: it takes {memory.model_state_bytes / 1e9:.1f} of the "
        f"{place.capacity_bytes / 1e9:.1f} GB that a rank may use under {fit.recipe.describe()}; {remedy}"
    )


def choose_measurement(request: ProfileRequest, samples: Path, assumptions: Assumptions) -> Measurement:
    """Choose the measurement as requested or as suits this machine; record assumptions.

    Args:
        request: options of `fcp profile`.
        samples: the samples file to write.
        assumptions: records each choice.
    """
    if request.recipe.recompute == "as-needed":
        raise UsageError(
            "--recompute as-needed mixes levels, and a measurement runs one; add --analytic, or measure one of them: "
            "--recompute none, activation, elementwise or selective"
        )
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
    if ranks % request.nodes:
        raise UsageError(f"--ranks {ranks} does not divide over --nodes {request.nodes}; give the ranks of all nodes")
    if on_cpu and request.nodes == 1 and ranks > units:
        assumptions.assume("times", f"{ranks} ranks sharing {units} cores", "as in a job with as many ranks here")
    max_length = request.max_length or (_CPU_MAX_LENGTH if on_cpu else _MAX_LENGTH)
    _assume(assumptions, "--max-length", request.max_length, max_length, "tokens")
    minutes = request.budget_minutes or (1.0 if on_cpu and spec.parameters < _SMALL_MODEL_PARAMETERS else 10.0)
    _assume(assumptions, "--budget-minutes", request.budget_minutes, f"{minutes:g}", "longer is more exact")
    if on_cpu:
        device_bytes = host_memory_bytes() / ranks
    else:  # of remote nodes, the cluster's description
        device_bytes = load_cluster(cluster).memory_bytes if device is None else device[1]
    place = place_of(cluster, ranks=ranks, nodes=request.nodes, device_bytes=device_bytes, on_cpu=on_cpu)
    fit = _fit(spec, request, place, assumptions)
    # Packs are measured under this recipe; fits are scaled to the requested one.
    recipe = replace(fit.recipe, lora=None, freeze=None)
    layers = default_layers(spec, recipe, device=kind, device_bytes=device_bytes, ranks=ranks)
    return Measurement(
        model=request.model or spec.name,
        cluster=cluster,
        ranks=ranks,
        nodes=request.nodes,
        degrees=default_degrees(ranks),
        max_length=max_length,
        device=kind,
        recipe=recipe,
        sync=fit.sync,
        layers=layers,
        vision_layers=default_vision_layers(spec, layers, device=kind),
        budget_seconds=60.0 * minutes,
        samples=samples,
    )


def _units(request: ProfileRequest, assumptions: Assumptions) -> tuple[str, int]:
    """Return the device kind to measure on, and the number of ranks on it."""
    if request.nodes > 1:  # the nodes may have other devices than this machine
        return request.device, request.nodes * _DEVICES_PER_NODE
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


def _assume(assumptions: Assumptions, name: str, given: object, value: object, reason: str) -> None:
    if not given:
        assumptions.assume(name, value, reason)


_STATE_SHARE = 2 / 3  # share of a rank's memory for training an unreduced model
_LAYER_COUNTS = (6, 4, 3)  # the largest that fits is measured, and a third of it


def default_layers(
    spec: ModelSpec, recipe: Recipe, *, device: str, device_bytes: float, ranks: int = 1
) -> tuple[int, ...]:
    """Return all layers if training them leaves memory for packs, else two counts that do."""

    def footprint(layers: int) -> Footprint:
        blocks = 0 if spec.vision is None else max(1, spec.vision.depth * layers // spec.num_layers)
        return Footprint(
            spec=spec,
            recipe=recipe,
            layers=layers,
            vision_layers=blocks,
            ranks=ranks,
            on_cpu=device == "cpu",
            device_bytes=device_bytes,
        )

    whole = footprint(spec.num_layers)
    if whole.memory().total_bytes(LEAST_LENGTH) + whole.optimizer_bytes <= _STATE_SHARE * device_bytes:
        return (spec.num_layers,)
    period = spec.layer_period  # keeps the ratio of layer kinds
    if device == "cpu":
        return (period, 2 * period)
    counts = [count for count in _LAYER_COUNTS if count * period <= spec.num_layers]
    most = next((count for count in counts if footprint(count * period).fits), 2)
    return (max(1, most // 3) * period, most * period)


def default_degrees(ranks: int, most: int = 8) -> tuple[int, ...]:
    """Return the default degrees: all up to 4, then 6 and 8; a single rank emulates them."""
    reach = ranks if ranks > 1 else most
    return tuple(degree for degree in (1, 2, 3, 4, 6, 8) if degree <= reach)


def default_vision_layers(spec: ModelSpec, layers: Sequence[int], *, device: str) -> tuple[int, ...]:
    """Return the encoder's block counts: all if the full language model is measured, else two counts; () without one.

    Deepstack mergers follow the first blocks, so both counts include all of them; both are multiples of the period of
    windowed blocks.
    """
    if spec.vision is None:
        return ()
    period = spec.vision.block_period
    least = min(-(-max(1, len(spec.vision.deepstack_layers)) // period) * period, spec.vision.depth)
    more = -(-(1 if device == "cpu" else 4) // period) * period
    most = min(least + more, spec.vision.depth)
    return (spec.vision.depth,) if len(layers) == 1 or least == most else (least, most)
