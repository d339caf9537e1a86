"""Plan a job that was launched without a plan, from the data and settings of its training loop, while it trains.

`python -m fcp_cli.planning.job_plan`, started by rank 0 and spoken to through its pipes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.console import Origins
from fcp_cli.errors import FcpError, PlanError, ProfileError
from fcp_cli.files import replaced_atomically, write_text_atomically
from fcp_cli.models.cluster import THIS_MACHINE
from fcp_cli.parquet_writer import parquet_writer
from fcp_cli.plan.job_facts import JobFacts, PlanningWish
from fcp_cli.plan.messages import Message, read_message, steps_bytes, table_of, write_message
from fcp_cli.plan.online import OnlineOptions, OnlineSettings, manifest_of
from fcp_cli.plan.step import StepPlan
from fcp_cli.plan.writer import plan_writer
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.journal import Journal
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.padded import Padded
from fcp_cli.planning.parallel import plan_step
from fcp_cli.planning.remedies import best_remedy
from fcp_cli.planning.run import kept_steps, plan_metadata
from fcp_cli.planning.settings import PlanInputs, resolve
from fcp_cli.planning.solvers import make_solver
from fcp_cli.recipe import RecipeRequest
from fcp_cli.validation import validated
from fcp_cli.words import counted, duration

_SHOWN_STEPS: Final = 16  # whose prediction is shown
_AHEAD: Final = 16
_AS_GOOD: Final = 0.02  # predictions that differ by less are called equal
_PATIENCE_SECONDS: Final = 60.0  # for the rest of a plan whose loop has ended early


def main(received: IO[bytes], answers: IO[bytes]) -> None:
    """Plan one job until its end closes the pipe; a failed request is answered with one line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which reach the ranks; their end closes the pipe
        signal.signal(number, signal.SIG_IGN)
    opening = read_message(received)
    if opening is None:
        return
    try:
        planner = _planner_of(opening)
        write_message(answers, planner.opened())
        while (message := read_message(received)) is not None:
            write_message(answers, *planner.answer(message))
            if message.kind == "close":
                return
    except FcpError as error:
        write_message(answers, {"kind": "error", "message": str(error)})
    except BrokenPipeError:
        pass  # the job has ended: the journal keeps its steps


def _planner_of(opening: Message) -> JobPlanner:
    facts = opening.facts
    job = validated(facts["job"], JobFacts, where="the job's facts", error=PlanError)
    wish = validated(facts["wish"], PlanningWish, where="the launch", error=PlanError)
    return JobPlanner(Path(facts["plan"]), job, wish, table_of(opening.table).column("length").to_numpy())


class JobPlanner:
    """Plans the steps of one job in order, and writes them as a plan when all are planned.

    Next to the plan it writes the manifest of the lengths and the cost profile. Until the plan is whole, a journal
    keeps its steps, from which a later start of the same job continues.

    Args:
        plan: that is to be written.
        job: facts of the loop.
        wish: as typed for the launch.
        lengths: [rows] tokens of the training data.

    Raises:
        FcpError: the job cannot be planned.
    """

    def __init__(self, plan: Path, job: JobFacts, wish: PlanningWish, lengths: IntArray) -> None:
        self._path, self._job = plan, job
        manifest = manifest_of(plan)
        _write_manifest(manifest, lengths)
        origins = Origins()
        self._request = _request(manifest, plan, job, wish)
        self._inputs = inputs = resolve(self._request, origins)
        self._batches = inputs.batches()
        self._profile = inputs.problem.profile
        self._solver = make_solver("fcp", self._batches)
        self.metadata = plan_metadata(inputs.table, self._batches, self._solver)
        self._journal = Journal(plan, self.metadata)
        self._seconds: list[float] = []
        self._shown: list[StepPlan] = []
        self._due = 0
        _say(_found(job, lengths, len(self._batches)))
        for warning in origins.warnings:
            _say(f"warning: {warning}")
        write_text_atomically(plan.with_name("profile.yaml"), self._profile.text)
        self._steps = self._planned()

    def opened(self) -> dict[str, Any]:
        """Return the first message to the job."""
        metadata = replace(self.metadata, steps=len(self._batches))
        settings = OnlineSettings(metadata=metadata, options=OnlineOptions(ahead=_AHEAD))
        return {"kind": "opened", "settings": settings.to_json(), "first_sequence": 0, "planned_to": 0, "refits": []}

    def answer(self, message: Message) -> tuple[Mapping[str, Any], bytes]:
        """Return the answer to one message.

        Raises:
            FcpError: it cannot be answered.
        """
        facts = message.facts
        if message.kind == "steps":
            return {"kind": "steps"}, steps_bytes(self.plan(facts["first_step"], facts["steps"]))
        return {"kind": "closed", "plan_hash": self.close()}, b""

    def plan(self, first_step: int, steps: int) -> list[StepPlan]:
        """Return so many steps, fewer at the end of the plan; those before `first_step` are planned as well.

        Raises:
            FcpError: the journal cannot be continued or written.
        """
        for _ in islice(self._steps, max(0, first_step - self._due)):
            self._due += 1
        found = list(islice(self._steps, steps))
        self._due += len(found)
        return found

    def close(self) -> str | None:
        """Write the plan; return its hash, or None if too many steps are not planned yet.

        Raises:
            FcpError: it cannot be written.
        """
        missing = len(self._batches) - self._due
        needed = missing * float(np.median(self._seconds)) if self._seconds else 0.0
        if needed > _PATIENCE_SECONDS:
            _say(
                f"{counted(self._due, 'step')} of {len(self._batches)} are planned: {self._journal.folder} keeps them, "
                "and a new start in the same folder continues (--run-dir)"
            )
            return None
        if missing:
            self.plan(self._due, missing)
        with plan_writer(self._path, self.metadata) as writer:
            for step in self._journal.all_steps():
                writer.append(step)
        self._journal.remove()
        return writer.metadata.plan_hash

    def _planned(self) -> Iterator[StepPlan]:
        """Yield all steps: those of the journal, then newly planned ones."""
        kept = 0
        if self._journal.exists:
            for step in kept_steps(self._batches, self._journal):
                kept += 1
                yield step
        else:
            self._journal.start()
        for number in range(kept, len(self._batches)):
            began = time.perf_counter()
            step = plan_step(self._batches.batch(number), self._batches.problem, self._solver)
            self._journal.append(step)
            self._seconds.append(time.perf_counter() - began)
            self._show(step)
            yield step

    def _show(self, step: StepPlan) -> None:
        """Print the prediction once enough steps are planned for one."""
        if step.step >= _SHOWN_STEPS:
            return
        self._shown.append(step)
        if step.step + 1 == min(_SHOWN_STEPS, len(self._batches)):
            _say(_decided(self._job, self._batches, self._shown))
            if gain := _gain_of_another_recipe(self._request, self._inputs):
                _say(gain)


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
    """Return the name under which the loop's own model is planned for."""
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
        f"{counted(steps, 'step')} are planned while it trains"
    )


def _decided(job: JobFacts, batches: GlobalBatches, steps: list[StepPlan]) -> str:
    profile = batches.problem.profile
    mean = float(np.mean([step.makespan_seconds for step in steps]))
    padded = padded_seconds(batches, job, [step.step for step in steps]) if job.loop != "DPOTrainer" else None
    origin = {"analytic": "computed, not measured: 'fcp profile' measures"}.get(profile.origin, profile.origin)
    return (
        f"{duration(mean)} a step predicted for the first {len(steps)}"
        f"{'' if padded is None else _against(mean, padded)}; times of {profile.model} on {profile.cluster} ({origin})"
    )


def _against(planned: float, padded: float) -> str:
    of_script = f"the script's own padded batches ({duration(padded)})"
    if planned < padded * (1 - _AS_GOOD):
        return f", {1 - planned / padded:.0%} less than {of_script}"
    if planned <= padded * (1 + _AS_GOOD):
        return f", as long as {of_script}: a plan gains nothing here"
    return f", {planned / padded - 1:.0%} more than {of_script}: start the script without fcp"


def padded_seconds(batches: GlobalBatches, job: JobFacts, steps: Sequence[int]) -> float:
    """Return the mean seconds of steps of the loop without a plan: batches padded to their longest, data parallel.

    Rows are in the plan's order, which is as random as the loop's own. What would not fit is priced all the same.
    """
    loader = Padded(batches.problem, batches.table, degree=1, rows_per_pass=job.rows_per_pass)
    return float(np.mean([loader.seconds(batches.batch(step)) for step in steps]))


def _say(line: str) -> None:
    print(f"fcp: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
