"""Refits a cost profile from the metrics of real training runs: every micro-batch is a sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from fcp_cli.cost.fitting import Sample, error_percent, fit_groups, predicted_seconds
from fcp_cli.cost.profile import CostProfile, StepTerms, dump_cost_profile, parse_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.models.model import load_model
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics import MetricsRecord, RunRecord, StepRecord
from fcp_cli.runs.metrics_reader import read_metrics

# Each n-th sample is held out; the error on these estimates the error of the new profile.
HOLD_OUT_EVERY = 5
_RUN_KEYS = ("model", "device", "device_name", "num_ranks", "sync", "torch", "started", "plan_hash")
_ROUNDING = 1e-9  # relative; smaller differences are not encoder work


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSamples:
    """Timed micro-batches of a run, its plan, and the plan's cost profile.

    Attributes:
        closing_seconds: time from the end of the last micro-batch to the end of the step, for steps that record it.
    """

    samples: tuple[Sample, ...]
    steps: int
    metadata: PlanMetadata
    planned: CostProfile
    run: RunRecord
    closing_seconds: tuple[float, ...] = ()

    @property
    def hides_encoder(self) -> bool:
        """Whether a vision encoder may have run that the plan did not price."""
        if self.planned.coefficients.vision_seconds_per_patch:
            return False
        try:
            return load_model(str(self.run.get("model"))).vision is not None
        except ProfileError:  # the model of a user's script
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """A refitted profile, with errors in percent before and after, on fitted and held-out micro-batches."""

    profile: CostProfile
    num_fitted: int
    num_held_out: int
    fitted_before_percent: float
    fitted_after_percent: float
    held_out_before_percent: float
    held_out_after_percent: float
    kept: tuple[str, ...]


def samples_of_run(metrics: Path, *, plan: Path | None, skip_steps: int) -> RunSamples:
    """Read a run's micro-batches, with lengths from its plan.

    Ranks of a group end together, and the last one to arrive did not wait: the shortest of their times is the
    micro-batch's.

    Args:
        metrics: the run's metrics.jsonl.
        plan: path of the plan, if it moved since the run.
        skip_steps: warm-up steps to skip after each start.
    """
    records = read_metrics(metrics)
    run = records[0]
    assert run["kind"] == "run"  # ensured by the reader
    path = plan or Path(run.get("plan", ""))
    reader = PlanReader(path)
    if run.get("plan_hash") not in (reader.metadata.plan_hash, ""):  # "": the run planned while it trained
        raise ProfileError(
            f"{path} is not the plan of {metrics}: its hash is {reader.metadata.plan_hash[:12]}, the run's is "
            f"{run.get('plan_hash', '')[:12]}; give the right one with --plan"
        )
    measured = dict(_steps_after_warm_up(records, skip_steps))
    if not measured:
        raise ProfileError(f"{metrics} has no steps beyond the first {skip_steps} of each start; lower --skip-steps")
    planned = parse_cost_profile(reader.metadata.cost_profile, name=f"{path}: the plan's cost profile")
    samples: list[Sample] = []
    for step in reader.steps(min(measured)):
        if step.step in measured:
            samples.extend(_samples_of_step(step, measured[step.step], reader.metadata.ranks_per_node, planned))
    return RunSamples(
        samples=tuple(samples),
        steps=len(measured),
        metadata=reader.metadata,
        planned=planned,
        run=run,
        closing_seconds=tuple(max(0.0, one["seconds"] - _end_of_work(one)) for one in measured.values()),
    )


def _end_of_work(record: StepRecord) -> float:
    ends = (one["start_seconds"] + one["seconds"] for rank in record["ranks"] for one in rank["micro_batches"])
    return max(ends, default=0.0)


def _measured_step(runs: Sequence[RunSamples], before: StepTerms) -> StepTerms:
    """Return the terms with the measured closing seconds, which include gradient reduction."""
    found = [seconds for run in runs for seconds in run.closing_seconds]
    if not found:
        return before
    summed = any(run.metadata.sync == "iteration" or not before.wave_floor_seconds for run in runs)
    return replace(before, update_seconds=float(np.median(found)), tail_seconds=0.0 if summed else before.tail_seconds)


def _steps_after_warm_up(records: Sequence[MetricsRecord], skip_steps: int) -> Iterable[tuple[int, StepRecord]]:
    since_start = 0
    for record in records:
        if record["kind"] == "run":
            since_start = 0
        elif record["kind"] == "step":
            if since_start >= skip_steps:
                yield record["step"], record
            since_start += 1


def _samples_of_step(step: StepPlan, record: StepRecord, ranks_per_node: int, planned: CostProfile) -> Iterable[Sample]:
    shortest: dict[int, float] = {}
    for rank in record["ranks"]:
        for timing in rank["micro_batches"]:
            order, seconds = timing["order"], timing["seconds"]
            shortest[order] = min(seconds, shortest.get(order, seconds))
    for microbatch in step.microbatches():
        seconds = shortest.get(microbatch.order, 0.0)
        if microbatch.lengths and seconds > 0:
            nodes = {rank // ranks_per_node for rank in microbatch.ranks}
            sample = Sample(
                lengths=microbatch.lengths,
                degree=microbatch.degree,
                seconds=seconds,
                crosses_nodes=len(nodes) > 1,
                heads_degree=microbatch.heads_degree,
            )
            yield replace(sample, patches=_patches(sample, microbatch.seconds, planned))


def _patches(sample: Sample, planned_seconds: float, planned: CostProfile) -> float:
    """Return the encoder work planned for a micro-batch, in patches: the time not explained by its lengths."""
    per_patch = planned.coefficients.vision_seconds_per_patch
    if not per_patch:
        return 0.0
    # The plan stores seconds, not patches: the difference to the seconds by length is the encoder's.
    encoder_seconds = planned_seconds - float(predicted_seconds([sample], planned)[0])
    if encoder_seconds < _ROUNDING * planned_seconds:
        return 0.0
    return encoder_seconds * sample.degree / per_patch


def refit(runs: Sequence[RunSamples], *, before: CostProfile | None = None) -> Refit:
    """Fit a profile to the micro-batches of all runs; `before` defaults to the first run's profile."""
    if before is None:
        before = runs[0].planned
    samples = [sample for run in runs for sample in run.samples]
    fitted = [sample for i, sample in enumerate(samples) if i % HOLD_OUT_EVERY != HOLD_OUT_EVERY - 1]
    held_out = samples[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
    fit = fit_groups(fitted, before, held_out=held_out)
    fitted_before, held_out_before = (error_percent(part, before) for part in (fitted, held_out))
    fitted_after, held_out_after = (error_percent(part, fit.profile) for part in (fitted, held_out))
    measurement = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "method": "micro-batches of training runs",
        "runs": [
            {key: value for key, value in run.run.items() if key in _RUN_KEYS}
            | {"steps": run.steps, "micro_batches": len(run.samples)}
            for run in runs
        ],
        "micro_batches_fitted": len(fitted),
        "micro_batches_held_out": len(held_out),
        "held_out_error_before_percent": round(held_out_before, 3),
        "held_out_error_percent": round(held_out_after, 3),
        "held_out_error_percent_by_model": {name: round(error, 3) for name, error in fit.held_out_percent.items()},
        "kept": list(fit.kept),
    }
    step = _measured_step(runs, before.step)
    profile = replace(fit.profile, origin="fitted", step=step, measurement=measurement)
    return Refit(
        profile=replace(profile, text=dump_cost_profile(profile)),
        num_fitted=len(fitted),
        num_held_out=len(held_out),
        fitted_before_percent=fitted_before,
        fitted_after_percent=fitted_after,
        held_out_before_percent=held_out_before,
        held_out_after_percent=held_out_after,
        kept=fit.kept,
    )
