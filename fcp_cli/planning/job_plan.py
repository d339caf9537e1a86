"""Plan a job that was launched without a plan, from the data and settings of its training loop.

`python -m fcp_cli.planning.job_plan`, started by rank 0 and spoken to through its pipes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import IO, Final

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.console import Origins
from fcp_cli.cost.model import causal_work, group_seconds
from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import FcpError, PlanError, ProfileError
from fcp_cli.files import replaced_atomically, write_text_atomically
from fcp_cli.models.cluster import THIS_MACHINE
from fcp_cli.parquet_writer import parquet_writer
from fcp_cli.plan.job_facts import JobFacts, PlanningWish
from fcp_cli.plan.messages import read_message, table_of, write_message
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.online import manifest_of
from fcp_cli.planning.batches import GlobalBatches, spread_steps
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.remedies import best_remedy
from fcp_cli.planning.run import PlanResult, make_plan
from fcp_cli.planning.settings import PlanInputs, resolve
from fcp_cli.recipe import RecipeRequest
from fcp_cli.validation import validated
from fcp_cli.words import counted, duration

_SAMPLED_STEPS: Final = 64
_AS_GOOD: Final = 0.02  # predictions that differ by less are called equal


def main(received: IO[bytes], answers: IO[bytes]) -> None:
    """Make the plan of one message, and answer with its hash or with one line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which reach the ranks; their end closes the pipe
        signal.signal(number, signal.SIG_IGN)
    message = read_message(received)
    if message is None:
        return
    facts = message.facts
    try:
        job = validated(facts["job"], JobFacts, where="the job's facts", error=PlanError)
        wish = validated(facts["wish"], PlanningWish, where="the launch", error=PlanError)
        lengths = table_of(message.table).column("length").to_numpy()
        metadata = plan_job(Path(facts["plan"]), job, wish, lengths)
        write_message(answers, {"plan_hash": metadata.plan_hash})
    except FcpError as error:
        write_message(answers, {"error": str(error)})


def plan_job(plan: Path, job: JobFacts, wish: PlanningWish, lengths: IntArray) -> PlanMetadata:
    """Write the plan of a job, the manifest of its lengths and its cost profile.

    Raises:
        FcpError: the job cannot be planned.
    """
    manifest = manifest_of(plan)
    _write_manifest(manifest, lengths)
    origins = Origins()
    request = _request(manifest, plan, job, wish)
    inputs = resolve(request, origins)
    batches = inputs.batches()
    _say(_found(job, lengths, len(batches)))
    for warning in origins.warnings:
        _say(f"warning: {warning}")
    started = time.perf_counter()
    result = make_plan(plan, inputs, solver_name="fcp")
    write_text_atomically(plan.with_name("profile.yaml"), inputs.problem.profile.text)
    _say(_decided(job, inputs, batches, result, time.perf_counter() - started))
    if gain := _gain_of_another_recipe(request, inputs):
        _say(gain)
    return result.metadata


def _gain_of_another_recipe(request: PlanRequest, inputs: PlanInputs) -> str:
    """Return the settings with which the script's steps would be quicker, or nothing."""
    sample = [] if inputs.data is None else inputs.data.sample(inputs.problem)
    remedy, _tried = best_remedy(request, inputs, sample)
    if remedy is None:
        return ""
    return f"the script has a recipe of its own; its steps would take {1 - remedy.factor:.0%} less with {remedy.flags}"


def _write_manifest(path: Path, lengths: IntArray) -> None:
    table = pa.table({"length": pa.array(lengths, pa.int64())})
    with replaced_atomically(path) as temporary, parquet_writer(temporary, table.schema) as writer:
        writer.write_table(table)


def _request(manifest: Path, plan: Path, job: JobFacts, wish: PlanningWish) -> PlanRequest:
    model = wish.model
    if model is None and wish.profile is None:
        config = plan.with_name("model.config.json")
        write_text_atomically(config, json.dumps(job.config))
        model = _described(config)
    is_computed = wish.profile is None and job.device == "cpu"
    return PlanRequest(
        manifest=manifest,
        profile=None if wish.profile is None else Path(wish.profile),
        model=model,
        cluster=THIS_MACHINE if is_computed else None,
        ranks=job.ranks,
        ranks_per_node=job.ranks_per_node,
        sync=job.sync,
        # A script's loop offloads nothing, and reduces gradients as it goes.
        recipe=RecipeRequest(**{"offload": "none", "reduce": "wave", **job.recipe})
        if wish.profile is None
        else RecipeRequest(),
        global_batch_size=job.global_batch_size,
        steps=job.steps,
        epochs=job.epochs,
        seed=job.seed,
        shuffle=job.shuffle,
        last_batch=job.last_batch,
    )


def _described(config: Path) -> str:
    """Return the name under which the loop's own model is planned for.

    Raises:
        ProfileError: fcp cannot describe it.
    """
    from fcp_cli.models.model import load_model

    try:
        load_model(config)
    except ProfileError as error:
        raise ProfileError(
            f"{error}; add --model NAME of a model of this size (see 'fcp list models'), or --profile with a cost "
            "profile that 'fcp profile' measured"
        ) from error
    return str(config)


def _found(job: JobFacts, lengths: IntArray, steps: int) -> str:
    return (
        f"no plan was given: {job.loop} trains {counted(len(lengths), 'row')} of {lengths.mean():,.0f} tokens on "
        f"average (longest {lengths.max():,}), {job.global_batch_size} a step on {counted(job.ranks, 'rank')}; "
        f"planning {counted(steps, 'step')}"
    )


def _decided(job: JobFacts, inputs: PlanInputs, batches: GlobalBatches, result: PlanResult, seconds: float) -> str:
    profile, summary = inputs.problem.profile, result.summary
    mean = summary.makespan_seconds / summary.steps
    padded = padded_seconds(batches, job) if job.loop != "DPOTrainer" else None
    origin = {"analytic": "computed, not measured: 'fcp profile' measures"}.get(profile.origin, profile.origin)
    return (
        f"planned in {duration(seconds)}: {duration(mean)} a step predicted"
        f"{'' if padded is None else _against(mean, padded)}; times of {profile.model} on {profile.cluster} ({origin})"
    )


def _against(planned: float, padded: float) -> str:
    of_script = f"the script's own padded batches ({duration(padded)})"
    if planned < padded * (1 - _AS_GOOD):
        return f", {1 - planned / padded:.0%} less than {of_script}"
    if planned <= padded * (1 + _AS_GOOD):
        return f", as long as {of_script}: a plan gains nothing here"
    return f", {planned / padded - 1:.0%} more than {of_script}: start the script without fcp"


def padded_seconds(batches: GlobalBatches, job: JobFacts) -> float:
    """Return the mean seconds of a step of the loop without a plan: batches padded to their longest, data parallel.

    Rows are in the plan's order, which is as random as the loop's own. What would not fit is priced all the same.
    """
    steps = [batches.batch(step) for step in spread_steps(len(batches), _SAMPLED_STEPS)]
    return float(
        np.mean([_padded_step(batch.lengths.astype(np.int64), batches.problem.profile, job) for batch in steps])
    )


def _padded_step(lengths: IntArray, profile: CostProfile, job: JobFacts) -> float:
    """Return the seconds of the slowest rank: each runs batches of `rows_per_pass` one after the other."""
    size = job.rows_per_pass
    starts = np.arange(0, len(lengths), size)
    longest = np.maximum.reduceat(lengths, starts)
    rows = np.diff([*starts, len(lengths)])
    padded = causal_work(np.repeat(longest, rows), profile.coefficients).packed(starts)
    seconds = group_seconds(profile, padded, degree=1, crosses_nodes=False)
    totals = np.zeros(job.ranks)
    np.add.at(totals, np.arange(len(starts)) % job.ranks, seconds)
    return float(totals.max())


def _say(line: str) -> None:
    print(f"fcp: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
