"""Validated metrics records: all readers parse lines here, and need not check values again."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypedDict, cast

from msgspec import Meta

from fcp_cli.reading.documents import decode_record, decode_shape
from fcp_cli.validation import NonNegative, Positive, RankCount, require_shape

# Exact as a float: arrays store these values as either.
WholeNumber = Annotated[int, Meta(ge=0, le=1 << 53, description="a whole number of at least 0")]


class TimingRecord(TypedDict):
    """A micro-batch on a rank: predicted and measured seconds, the latter from the start of the step."""

    order: WholeNumber
    degree: RankCount
    tokens: WholeNumber
    predicted_seconds: NonNegative
    start_seconds: NonNegative
    seconds: NonNegative


class _Rank(TypedDict):
    rank: WholeNumber
    idle_seconds: NonNegative
    micro_batches: list[TimingRecord]


class RankRecord(_Rank, total=False):
    """A rank in a step; earlier versions recorded no memory."""

    busy_seconds: NonNegative
    peak_memory_bytes: WholeNumber | None


class _Step(TypedDict):
    kind: Literal["step"]
    step: WholeNumber
    loss: float | None
    tokens: WholeNumber
    seconds: Positive
    predicted_seconds: Positive
    idle_fraction: NonNegative
    ranks: list[RankRecord]


class StepRecord(_Step, total=False):
    """A measured step; earlier versions wrote fewer fields."""

    warm_up: bool
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_second: NonNegative
    mfu: float | None
    peak_memory_bytes: WholeNumber | None
    bad_rows: list[WholeNumber]


class BucketRecord(TypedDict):
    """Held-out sequences of similar length."""

    up_to_tokens: WholeNumber
    tokens: WholeNumber
    loss: float | None


class EvalRecord(TypedDict):
    """An evaluation after a step."""

    kind: Literal["eval"]
    step: WholeNumber
    loss: float | None
    tokens: WholeNumber
    seconds: NonNegative
    buckets: list[BucketRecord]


class _Run(TypedDict):
    kind: Literal["run"]
    num_ranks: RankCount
    ranks_per_node: RankCount


class RunRecord(_Run, total=False):
    """A start of the run, with the fields that are read; files hold more, for display only."""

    format: str
    plan: str
    plan_hash: str
    started: str
    first_step: WholeNumber
    steps: WholeNumber
    model: str | None
    device: str
    device_name: str | None
    sync: str
    torch: str | None
    program: str


MetricsRecord = RunRecord | StepRecord | EvalRecord
_KIND_WITHIN: Final = 40  # bytes; all our writers put it first
_STEP: Final = re.compile(rb'"kind": ?"step"')
_SHAPES: Final[dict[str, Any]] = {"run": RunRecord, "step": StepRecord, "eval": EvalRecord}


def parse_record(line: str | bytes) -> MetricsRecord | None:
    """Parse a line; return None for kinds that only later versions know."""
    head = line[:_KIND_WITHIN] if isinstance(line, bytes) else line[:_KIND_WITHIN].encode(errors="replace")
    if _STEP.search(head):
        return decode_shape(line, StepRecord)  # large: has values for every rank, so validate while parsing
    record = decode_record(line)
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        raise ValueError("it is not a record")
    if kind not in _SHAPES:
        return None
    require_shape(record, _SHAPES[kind])
    return cast(MetricsRecord, record)
