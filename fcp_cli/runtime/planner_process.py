"""Planner process of this rank: started, driven through its pipes, and ended with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fcp_cli.errors import RunError
from fcp_cli.plan.file import Message, read_message, steps_of, table_bytes, write_message
from fcp_cli.plan.metadata import JobFacts, OnlineSettings, PlanningWish, cut_by_count, cut_by_tokens
from fcp_cli.plan.step import StepPlan
from fcp_cli.util.masks import CAUSAL, MaskedSequence
from fcp_cli.util.processes import ending
from fcp_cli.vision.parts import VisualSequence


class PlanningProcess:
    """Plans steps of one job in a child process, which ends with this process in any case.

    Attributes:
        opened: the journal's `refits`, the step that earlier runs have `planned_to`, and facts of the subclass.
    """

    def __init__(self, opening: Mapping[str, Any], table: bytes = b"") -> None:
        self._process = planner_process()
        self._tell("open", opening, table)
        self.opened: Mapping[str, Any] = self._answer().facts

    def refit(self, first_step: int, measured: bytes) -> Mapping[str, Any]:
        """Return the `refit` that takes effect at a step (None without a change), and a `line` about it.

        Args:
            first_step: next step to plan.
            measured: table of the micro-batches trained since the last refit.
        """
        self._tell("measured", {"first_step": first_step}, measured)
        return self._answer().facts

    def close(self, end_step: int, *, is_stopped: bool = False) -> str | None:
        """End the process; return the hash of the plan it wrote.

        Args:
            end_step: the step after the last trained one.
            is_stopped: whether the loop was ended early; the next run then continues the plan.
        """
        try:
            self._tell("close", {"end_step": end_step, "is_stopped": is_stopped})
            found: str | None = self._answer().facts["plan_hash"]
            return found
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let the process end by itself, keeping its plan."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(OSError):
                    pipe.close()

    def _tell(self, kind: str, facts: Mapping[str, Any], table: bytes = b"") -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # if it has ended, its last answer contains the reason
            write_message(self._process.stdin, {"kind": kind, **facts}, table)

    def _answer(self) -> Message:
        assert self._process.stdout is not None
        answer = read_message(self._process.stdout)
        if answer is None:
            raise RunError(f"the planning process {ending(self._process.wait())}; its output, if any, is above")
        if answer.kind == "error":
            raise RunError(answer.facts["message"])
        return answer


class StreamProcess(PlanningProcess):
    """Plans batches of a stream."""

    def __init__(self, settings: OnlineSettings, plan: Path, first_step: int) -> None:
        super().__init__({"settings": settings.to_json(), "plan": str(plan), "first_step": first_step})

    def plan(self, batch: ReadBatch) -> list[StepPlan]:
        """Return the planned step of a batch."""
        self._tell("batch", _facts_of(batch), table_bytes(batch.columns()))
        return steps_of(self._answer().table)

    def compare(self, batch: ReadBatch) -> None:
        """Compare a batch with the one trained before; the next answer is an error if they differ."""
        self._tell("trained", _facts_of(batch), table_bytes(batch.columns()))

    def adopt(self, refit: Mapping[str, Any]) -> None:
        """Use a refit for planning from its first step on."""
        self._tell("adopt", {"refit": refit})


class JobProcess(PlanningProcess):
    """Plans the steps of a job whose data is known from the start.

    Args:
        plan: path of the plan.
        job, wish: facts of the job, and planning options.
        rows: rows of the training data, as columns of a manifest.
    """

    def __init__(self, plan: Path, job: JobFacts, wish: PlanningWish, rows: pa.Table) -> None:
        self._begin_again = partial(JobProcess, plan, job, wish, rows)
        opening = {"plan": str(plan), "job": asdict(job), "wish": asdict(wish)}
        super().__init__(opening, table_bytes(rows))

    def close(self, end_step: int, *, is_stopped: bool = False) -> str | None:
        """End the process as above; if it was killed, another one completes the plan from its journal."""
        try:
            return super().close(end_step, is_stopped=is_stopped)
        except RunError as error:
            if not self._process.poll():
                raise
            print(f"fcp: {error}; another one completes the plan", file=sys.stderr, flush=True)
            return PlanningProcess.close(self._begin_again(), end_step, is_stopped=is_stopped)

    def plan(self, first_step: int, steps: int) -> list[StepPlan]:
        """Return the next `steps` planned steps; fewer at the end of the plan."""
        self._tell("steps", {"first_step": first_step, "steps": steps})
        return steps_of(self._answer().table)


def _facts_of(batch: ReadBatch) -> dict[str, Any]:
    return {"step": batch.step, "first_sequence": batch.first_sequence}


# Items of a stream: sequences as ids and lengths, or as rows with their tokens, read in whole batches.

_FACTORS = {"eta": np.float64, "vision_patches": np.int64, "vision_patch_pairs": np.int64}


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence of a stream.

    Attributes:
        length: number of tokens.
        given: its id, which `fetch` takes, or its row.
        is_row: whether `given` is a row.
        factors: work factors besides the length, by manifest column.
    """

    length: int
    given: Any
    is_row: bool
    factors: Mapping[str, float]


def item_of(given: Any, number: int) -> Item:
    """Parse item `number` of a stream."""
    if _is_id_with_length(given):
        given = {"id": given[0], "length": given[1]}
    if isinstance(given, Mapping) and "length" in given and "input_ids" not in given:
        if not isinstance(given.get("id"), (int, str)) or not _is_whole(given["length"]):
            raise RunError(
                f"sequence {number} of the stream has the id {given.get('id')!r} and the length {given['length']!r}; "
                "an id is a number or a text, a length a number of tokens"
            )
        factors = {name: given[name] for name in _FACTORS if given.get(name) is not None}
        return Item(int(given["length"]), given["id"], False, factors)
    tokens: Any = given.get("input_ids") if isinstance(given, Mapping) else getattr(given, "tokens", given)
    if isinstance(given, tuple) and len(given) == 2:
        tokens = given[0]
    mask = given.mask if isinstance(given, (MaskedSequence, VisualSequence)) else CAUSAL
    try:
        length = len(tokens)
        return Item(length, given, True, {} if mask.is_causal else {"eta": mask.eta(length)})
    except TypeError:
        raise RunError(
            f"sequence {number} of the stream is {_shown(given)}; a stream gives (id, length), or rows with input_ids"
        ) from None


def row_of(given: Any) -> Any:
    """Return the loader's item of a row: its tokens, or (tokens, labels)."""
    if not isinstance(given, Mapping):
        return given
    return given["input_ids"] if given.get("labels") is None else (given["input_ids"], given["labels"])


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadBatch:
    """Sequences of one step.

    Attributes:
        step: optimizer step that trains them.
        first_sequence: number of the first one in the stream.
        items: the sequences.
    """

    step: int
    first_sequence: int
    items: Sequence[Item]

    def columns(self) -> pa.Table:
        """Return the table of the sequences for the planner process."""
        items = self.items
        try:
            columns: dict[str, Any] = {"length": np.array([item.length for item in items], dtype=np.int64)}
            for name, kind in _FACTORS.items():
                columns[name] = np.array([item.factors.get(name, 0) for item in items], dtype=kind)
            if items and not items[0].is_row:
                columns["id"] = pa.array([item.given for item in items])
            return pa.table(columns)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise RunError(
                f"sequences {self.first_sequence} and on of the stream cannot be kept: {error}; ids are all numbers or "
                "all texts, factors are numbers"
            ) from error


def read_batches(stream: Iterable[Any], settings: OnlineSettings, *, step: int, sequence: int) -> Iterator[ReadBatch]:
    """Read a stream in whole batches, numbering steps from `step` and sequences from `sequence`."""
    for number, items in enumerate(_batches(iter(stream), settings, sequence), start=step):
        yield ReadBatch(step=number, first_sequence=sequence, items=items)
        sequence += len(items)


def _batches(stream: Iterator[Any], settings: OnlineSettings, sequence: int) -> Iterator[list[Item]]:
    batching = settings.metadata.batching
    if batching is not None and batching.by == "given":
        for batch in stream:
            if isinstance(batch, Mapping) or not isinstance(batch, Iterable) or _is_id_with_length(batch):
                raise RunError(
                    f"the stream gives {_shown(batch)} where a batch is due; name global_batch_size or "
                    "global_batch_tokens for a stream of single sequences: planner.online(global_batch_size=...)"
                )
            items = [item_of(given, sequence + place) for place, given in enumerate(batch)]
            sequence += len(items)
            yield items
        return
    items_of = (item_of(given, number) for number, given in enumerate(stream, start=sequence))
    if batching is not None and batching.tokens is not None:
        yield from cut_by_tokens(items_of, batching.tokens, lambda item: item.length)
    else:
        yield from cut_by_count(items_of, settings.metadata.global_batch_size)


def _is_id_with_length(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (int, str))


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:60]}..."


# Start the planner process of a job without a plan early, so that it imports and loads in parallel with the script.

_waiting: list[subprocess.Popen[bytes]] = []  # started early; the first caller of `planner_process` gets it


def start_early(environment: Mapping[str, str]) -> None:
    """Start the planner process on rank 0 of a job without a plan; it ends with this process if nothing trains."""
    if environment.get("RANK") != "0" or "FCP_PLANNING" not in environment:
        return
    from fcp_cli.plan.metadata import has_no_plan

    if has_no_plan():
        _waiting.append(_started("early"))


def planner_process() -> subprocess.Popen[bytes]:
    """Return the process that was started early, or a new one."""
    return _waiting.pop() if _waiting else _started()


def _started(*words: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "fcp_cli.planning", *words]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
