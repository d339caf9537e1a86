"""Planner of a job launched without a plan, from the data and settings of its training loop, while it trains."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fcp_cli.cost.model import Work, causal_work
from fcp_cli.cost.profile import load_cost_profile
from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.errors import PlanError, ProfileError
from fcp_cli.manifest.table import MANIFEST_FORMAT, METADATA_KEY, LengthTable
from fcp_cli.models.cluster import THIS_MACHINE
from fcp_cli.plan.file import Message, plan_writer, steps_bytes, table_of
from fcp_cli.plan.metadata import (
    MOST_FACTOR,
    JobFacts,
    OnlineOptions,
    OnlineSettings,
    PlanMetadata,
    PlanningWish,
    ScheduledRefit,
    manifest_of,
)
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import GlobalBatches, batch_of, spread_steps
from fcp_cli.planning.drafts import Draft, assignment_of, best_fit_decreasing, members_by_pack
from fcp_cli.planning.journal import PlanJournal, is_begun
from fcp_cli.planning.make_plan import kept_steps, plan_metadata, plan_step
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.padded import Padded
from fcp_cli.planning.problem import Problem, problem_of
from fcp_cli.planning.refitting import Refitter
from fcp_cli.planning.settings import PlanInputs, resolve, split_attention
from fcp_cli.planning.solvers import make_solver
from fcp_cli.planning.verdict import best_remedy
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.console import Assumptions
from fcp_cli.util.files import replaced_atomically, write_text_atomically
from fcp_cli.util.masks import MASK_COLUMN
from fcp_cli.util.parquet import parquet_writer
from fcp_cli.util.validation import validated
from fcp_cli.util.words import counted, duration

_SHOWN_STEPS: Final = 16  # steps of the printed prediction
_AHEAD: Final = 16
_ENDLESS_EPOCHS: Final = 1_000_000  # stand-in for an unknown number of epochs
_PATIENCE_SECONDS: Final = 60.0  # limit for planning the missing steps at the end of training
_STOPPED_SECONDS: Final = 3.0  # same if the job was stopped early and waits


def planner_of(opening: Message) -> JobPlanner:
    """Return the planner of the job described by its opening message."""
    facts = opening.facts
    job = validated(facts["job"], JobFacts, where="the job's facts", error=PlanError)
    wish = validated(facts["wish"], PlanningWish, where="the launch", error=PlanError)
    return JobPlanner(Path(facts["plan"]), job, wish, table_of(opening.table))


class JobPlanner:
    """Planner that plans the steps of a job in order and writes the plan once all are planned.

    It also writes the manifest of the lengths and the cost profile next to the plan. Until the plan is complete, a
    journal keeps its steps, so that a restart of the job can continue.

    Args:
        plan: plan file to write.
        job: facts of the training loop.
        wish: command-line options of the launch.
        rows: training data, in the columns of a manifest.
    """

    def __init__(self, plan: Path, job: JobFacts, wish: PlanningWish, rows: pa.Table) -> None:
        self._path, self._job = plan, job
        manifest = manifest_of(plan)
        _write_manifest(manifest, rows)
        assumptions = Assumptions()
        inputs = resolve(_request(manifest, plan, job, wish), assumptions)
        _require_encoder(inputs)
        before = plan.with_name("profile.yaml") if is_begun(plan) and wish.profile is None else None
        self._inputs, self._measures, self._times = _with_times(inputs, before)
        self._batches = self._inputs.batches()
        if job.epochs is None:
            self._batches.settings = replace(self._batches.settings, epochs=_ENDLESS_EPOCHS)
        self._solver = make_solver("fcp", self._batches)
        self._journal = PlanJournal(plan, plan_metadata(self._inputs.table, self._batches, self._solver))
        self._journal.read_refit()
        self._refitter = Refitter(self._inputs.problem, most_change=MOST_FACTOR)
        self._priced_by: ScheduledRefit | None = None
        self._seconds: list[float] = []
        self._shown: list[StepPlan] = []
        self._due = 0
        _say(_found(job, self._inputs.table, self._batches))
        for warning in assumptions.warnings:
            _say(f"warning: {warning}")
        write_text_atomically(plan.with_name("profile.yaml"), self._inputs.problem.profile.text)
        self._steps = self._planned()

    @property
    def metadata(self) -> PlanMetadata:
        """Metadata of the plan with the refit so far, without totals and hash."""
        return self._journal.metadata

    @property
    def wants_measurements(self) -> bool:
        """Whether the profile is still to be refitted to the first minute of training."""
        return self._measures and not self.metadata.refits

    def opened(self) -> dict[str, Any]:
        """Return the first message to the job."""
        metadata = replace(self.metadata, steps=len(self._batches))
        settings = OnlineSettings(metadata=metadata, options=OnlineOptions(ahead=_AHEAD))
        facts = {"kind": "opened", "settings": settings.to_json(), "first_sequence": 0, "planned_to": 0, "refits": []}
        return {**facts, "wants_measurements": self.wants_measurements}

    def answer(self, message: Message) -> tuple[Mapping[str, Any], bytes]:
        """Return the answer to one message."""
        facts = message.facts
        if message.kind == "steps":
            return {"kind": "steps"}, steps_bytes(self.plan(facts["first_step"], facts["steps"]))
        if message.kind == "measured":
            return {"kind": "refit", "line": self.refit(table_of(message.table))}, b""
        return {"kind": "closed", "plan_hash": self.close(facts["end_step"], is_stopped=facts["is_stopped"])}, b""

    def plan(self, first_step: int, steps: int) -> list[StepPlan]:
        """Return `steps` steps from `first_step` on, fewer at the end of the plan, planning all steps before them."""
        for _ in islice(self._steps, max(0, first_step - self._due)):
            self._due += 1
        found = list(islice(self._steps, steps))
        self._due += len(found)
        return found

    def refit(self, measured: pa.Table) -> str:
        """Refit the profile to measured micro-batches, for all steps planned from now on.

        Args:
            measured: columns step, order, rank and seconds of micro-batches.

        Returns:
            A line that describes the refit.
        """
        found, line = self._refitter.refit(self._due, measured, None)
        if found is not None and self._due < len(self._batches):
            self._journal.note_refit(found)
        return f"step {self._due}: {line}"

    def _price_as_of(self, step: int) -> None:
        """Switch problem and solver to the refit that applies at a step."""
        refit = self.metadata.refit_at(step)
        if refit is not self._priced_by:
            problem = problem_of(self.metadata, name="the job", step=step)
            self._batches = GlobalBatches(self._inputs.table, problem, self._batches.settings)
            self._solver = make_solver("fcp", self._batches)
            self._priced_by = refit

    def close(self, end_step: int, *, is_stopped: bool = False) -> str | None:
        """Write the plan and return its hash, or None if too many steps are not planned yet.

        If the number of epochs was unknown, the plan has the epochs that the loop began.

        Args:
            end_step: one more than the last trained step.
            is_stopped: whether the loop was stopped early and its job waits for the plan.
        """
        steps, metadata = len(self._batches), self.metadata
        if self._job.epochs is None:
            epochs = max(1, -(-end_step // self._batches.steps_per_epoch))
            steps, metadata = epochs * self._batches.steps_per_epoch, replace(metadata, epochs=epochs)
        metadata = replace(
            metadata, refits=tuple(one for one in metadata.refits or () if one.first_step < steps) or None
        )
        missing = max(0, steps - self._due)
        needed = missing * float(np.median(self._seconds)) if self._seconds else 0.0
        if needed > (_STOPPED_SECONDS if is_stopped else _PATIENCE_SECONDS):
            _say(
                f"{counted(self._due, 'step')} of {steps} are planned: {self._journal.folder} keeps them, "
                "and a new start in the same folder continues (--run-dir)"
            )
            return None
        if missing:
            self.plan(self._due, missing)
        with plan_writer(self._path, metadata) as writer:
            for step in islice(self._journal.all_steps(), steps):
                writer.append(step)
        self._journal.remove()
        return writer.metadata.plan_hash

    def _planned(self) -> Iterator[StepPlan]:
        """Yield all steps: those of the journal, then newly planned ones."""
        kept = 0
        if is_begun(self._path):
            for step in kept_steps(self._batches, self._journal):
                kept += 1
                yield step
        else:
            self._journal.start()
        for number in range(kept, len(self._batches)):
            began = time.perf_counter()
            self._price_as_of(number)
            step = plan_step(self._batches.batch(number), self._batches.problem, self._solver)
            self._journal.append(step)
            self._refitter.keep(step, self._batches.table.take(step.sequences))
            self._seconds.append(time.perf_counter() - began)
            self._show(step)
            yield step

    def _show(self, step: StepPlan) -> None:
        """Print the prediction once enough steps are planned."""
        if step.step >= _SHOWN_STEPS:
            return
        self._shown.append(step)
        foreseen = self._batches.steps_per_epoch if self._job.epochs is None else len(self._batches)
        if step.step + 1 == min(_SHOWN_STEPS, foreseen):
            mean = float(np.mean([step.makespan_seconds for step in self._shown]))
            compared, gain = comparison(self._job, self._batches, mean, [step.step for step in self._shown])
            profile, number = self._batches.problem.profile, len(self._shown)
            _say(
                f"{duration(mean)} a step predicted for the first {number}{compared}; times of {profile.model} on "
                f"{profile.cluster} ({self._times})"
            )
            if self._measures:  # the times are computed, and no measure of how long the job takes
                write_text_atomically(self._path.with_name("gain.txt"), gain.removeprefix(", "))
            if advice := _gain_of_another_recipe(self._inputs, self._job.loop):
                _say(advice)


def _gain_of_another_recipe(inputs: PlanInputs, loop: str) -> str:
    """Return a line about settings under which the script's steps would be faster, or ""."""
    sample = [] if inputs.data is None else inputs.data.sample(inputs.problem)
    remedy, _tried = best_remedy(inputs, sample)
    if remedy is None:
        return ""
    is_trainer = loop in ("Trainer", "SFTTrainer", "DPOTrainer")  # other loops have no setting of that name
    setting = "gradient_checkpointing=False" if is_trainer else "its activation checkpointing off"
    flags = remedy.flags.replace("--recompute none", setting)
    return f"the script's steps would take {1 - remedy.factor:.0%} less with {flags}"


def _write_manifest(path: Path, rows: pa.Table) -> None:
    """Write the rows as a manifest; a mask column, if any, holds masks derived from token types."""
    header: dict[str, Any] = {"format": MANIFEST_FORMAT}
    if MASK_COLUMN in rows.column_names:
        header["source"] = {"path": "", "kind": "loop", "content": "lengths", "mask": "types:token_type_ids"}
    with replaced_atomically(path) as temporary, parquet_writer(temporary, rows.schema) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({METADATA_KEY.decode(): json.dumps(header)})


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
        # The script's own loop does not offload, and reduces gradients in every backward.
        recipe=RecipeRequest(**{"offload": "none", "reduce": "wave", **job.recipe})
        if wish.profile is None
        else RecipeRequest(),
        global_batch_size=job.global_batch_size,
        steps=job.steps,
        epochs=job.epochs or 1,
        seed=job.seed,
        shuffle=job.shuffle,
        last_batch=job.last_batch,
    )


def _with_times(inputs: PlanInputs, before: Path | None) -> tuple[PlanInputs, bool, str]:
    """Return the inputs with the profile that the job plans with.

    Args:
        before: profile of an earlier start of this job, or None on its first start.

    Returns:
        (inputs, whether to refit to the first minute of training, phrase about the profile for messages).
    """
    profile = inputs.problem.profile
    if profile.origin != "analytic" or inputs.request.model is None:
        return inputs, False, profile.origin
    if before is None:
        return inputs, True, "computed; the first minute of training is measured"
    priced = load_cost_profile(before)
    problem = replace(inputs.problem, profile=priced, attention=split_attention(inputs.request, priced))
    return replace(inputs, problem=problem), True, "those with which the job began"


def _described(config: Path) -> str:
    """Return the loop's model configuration as a model argument; raise ProfileError if it cannot be described."""
    from fcp_cli.models.model import load_model

    try:
        load_model(config)
    except ProfileError as error:
        raise ProfileError(
            f"{error}; add --model NAME of a model of this size (see 'fcp list models'), or --profile with a cost "
            "profile that 'fcp profile' measured"
        ) from error
    return str(config)


def _require_encoder(inputs: PlanInputs) -> None:
    """Raise ProfileError if the data have images but the profile does not price a vision encoder."""
    patches, profile = inputs.table.vision_patches, inputs.problem.profile
    if patches is not None and not profile.prices_vision:
        raise ProfileError(
            f"{counted(int(np.count_nonzero(patches)), 'row')} of the training data have pictures, but the cost "
            f"profile of {profile.model} has no vision encoder; give the --model or --profile of a vision-language "
            "model"
        )


def _found(job: JobFacts, table: LengthTable, batches: GlobalBatches) -> str:
    lengths, patches = table.length_tokens, table.vision_patches
    pictures = "" if patches is None else f", {counted(int(np.count_nonzero(patches)), 'row')} with pictures"
    steps = counted(len(batches), "step")
    if job.epochs is None:
        steps = f"{counted(batches.steps_per_epoch, 'step')} an epoch, for as many epochs as the loop has,"
    return (
        f"no plan was given: {job.loop} trains {counted(len(lengths), 'row')} of {lengths.mean():,.0f} tokens on "
        f"average (longest {lengths.max():,}{pictures}), {job.global_batch_size} a step on "
        f"{counted(job.ranks, 'rank')}; {steps} are planned while it trains"
    )


def _say(line: str) -> None:
    print(f"fcp: {line}", file=sys.stderr, flush=True)


# Predicted seconds of a script's own batches, padded or packed, for comparison with the plan of its job.

_AS_GOOD: Final = 0.02  # relative difference below which predictions are called equal
_PACKED_ROWS: Final = 8192  # largest sample of the training data that is packed
_PACKED_STEPS: Final = 16  # largest number of packed steps that are priced


def comparison(job: JobFacts, batches: GlobalBatches, planned: float, steps: Sequence[int]) -> tuple[str, str]:
    """Return a clause that compares the planned seconds of a step with the script's own, and the same without seconds.

    Args:
        job: facts of the script's loop; for `DPOTrainer` the clauses are empty.
        batches: the batches of the plan.
        planned: mean predicted seconds of `steps` under the plan.
        steps: the steps to compare.
    """
    if job.loop == "DPOTrainer":
        return "", ""
    squares = ", with attention over the joined row" if job.masks_all_pairs else ""
    if job.packs_to is None:
        own = own_seconds(batches, job, steps)
        habit = f"the script's own {'padding-free' if job.concatenates else 'padded'} batches"
        figures = f"{squares}{', rows grouped by length' if job.groups_by_length else ''}"
    else:
        own, sequences = packed_step(batches, job)
        own *= job.global_batch_size / sequences
        habit, figures = "the script's own packing", f" for as many sequences{squares}"
    if planned < own * (1 - _AS_GOOD):
        clause = f", {1 - planned / own:.0%} less than {{}}"
    elif planned <= own * (1 + _AS_GOOD):
        clause = ", as long as {}: a plan gains nothing here"
    else:
        clause = f", {planned / own - 1:.0%} more than {{}}: start the script without fcp"
    return clause.format(f"{habit} ({duration(own)}{figures})"), clause.format(habit)


def own_seconds(batches: GlobalBatches, job: JobFacts, steps: Sequence[int]) -> float:
    """Return the mean seconds of a step without a plan: data parallel, rows padded to the longest or joined.

    Rows are in the plan's order, which is as random as the script's, unless it groups them by length. Batches are
    priced even if they do not fit.
    """
    if job.groups_by_length:
        size, order = job.global_batch_size, _grouped_rows(batches, job)
        drawn = [order[step * size :][:size] for step in spread_steps(max(1, len(order) // size), _PACKED_STEPS)]
    else:
        drawn = [batches.batch(step).rows for step in steps]
    if job.concatenates:
        return float(np.mean([_priced(batches, job, np.split(rows, len(rows)))[0] for rows in drawn]))
    problem, table = batches.problem, batches.table
    loader = Padded(problem, table, degree=1, rows_per_pass=job.rows_per_pass)
    return float(np.mean([loader.seconds(batch_of(table.take(rows), problem, rows=rows)) for rows in drawn]))


def _grouped_rows(batches: GlobalBatches, job: JobFacts) -> IntArray:
    """Return all rows as transformers' LengthGroupedSampler draws them: longest first in blocks of some batches."""
    rows = np.random.default_rng(0).permutation(batches.rows)
    size = job.global_batch_size // job.ranks
    block = size * max(1, min(len(rows) // (4 * size), 50))
    lengths = batches.table.length_tokens
    blocks = np.split(rows, range(block, len(rows), block))
    return np.concatenate([one[np.argsort(-lengths[one], kind="stable")] for one in blocks])


def packed_step(batches: GlobalBatches, job: JobFacts) -> tuple[float, float]:
    """Return the mean seconds and the mean number of sequences of an optimizer step of a script that packs.

    Sequences are packed best-fit decreasing into rows, and rows are drawn at random, `global_batch_size` per step. Only
    whole steps are priced, unless the data has none. Rows are priced even if they do not fit.
    """
    rows = np.random.default_rng(0).permutation(batches.rows)[:_PACKED_ROWS]
    table = batches.table.take(rows)
    pack_of, _ = best_fit_decreasing(table.length_tokens, max(job.packs_to or 0, int(table.length_tokens.max())))
    offsets, members = members_by_pack(pack_of, int(pack_of.max()) + 1)
    packs = np.random.default_rng(0).permutation(len(offsets) - 1)
    whole = max(1, len(packs) // job.global_batch_size)
    found = []
    for step in spread_steps(whole, _PACKED_STEPS):
        own = packs[step * job.global_batch_size :][: job.global_batch_size]
        found.append(_priced(batches, job, [rows[members[offsets[pack] : offsets[pack + 1]]] for pack in own]))
    seconds, sequences = np.mean(found, axis=0)
    return float(seconds), float(sequences)


def _priced(batches: GlobalBatches, job: JobFacts, packs: Sequence[IntArray]) -> tuple[float, int]:
    """Return the seconds and the number of sequences of an optimizer step on these packs of manifest rows."""
    problem = batches.problem
    batch = batch_of(batches.table.take(np.concatenate(packs)), problem)
    ends = np.cumsum([0, *map(len, packs)])
    if job.masks_all_pairs:
        batch = replace(batch, work=_of_all_pairs(batch.work, ends[: -1 : job.rows_per_pass], problem))
    drafts = []
    for turn, first in enumerate(range(0, len(packs), job.rows_per_pass)):
        last = min(first + job.rows_per_pass, len(packs))
        drafts.append(Draft([turn % problem.num_ranks], range(ends[first], ends[last])))
    return makespan_seconds(assignment_of(drafts, problem.sync), batch, problem), len(batch.rows)


def _of_all_pairs(work: Work, starts: IntArray, problem: Problem) -> Work:
    """Return the work of sequences joined to one row from each of `starts` on, whose attention is priced as one's."""
    tokens = np.add.reduceat(work.tokens, starts)
    # Under a mask SDPA skips nothing; measured on CPUs, that takes as long as causal attention over the whole row.
    seconds = causal_work(tokens, problem.profile.coefficients).attention_seconds
    row = np.repeat(np.arange(len(starts)), np.diff([*starts, len(work.tokens)]))
    return replace(work, attention_seconds=work.tokens * (seconds / tokens)[row])
