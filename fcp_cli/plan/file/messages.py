"""Messages between a training job and its planner process: a line of JSON, and a table behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

import pyarrow as pa

from fcp_cli.plan.file.schema import steps_from_arrow, steps_to_arrow
from fcp_cli.plan.step import StepPlan


class Message(NamedTuple):
    """One message: `kind` and other facts, and the bytes of a table; empty where there is none."""

    facts: Mapping[str, Any]
    table: bytes

    @property
    def kind(self) -> str:
        return str(self.facts["kind"])


def write_message(pipe: IO[bytes], facts: Mapping[str, Any], table: bytes = b"") -> None:
    """Write one message and let it go."""
    pipe.write(json.dumps({**facts, "bytes": len(table)}).encode() + b"\n")
    pipe.write(table)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> Message | None:
    """Return the next message; None where the other end has closed, or ended in its midst."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    facts = json.loads(line)
    table = pipe.read(facts["bytes"])
    return Message(facts, table) if len(table) == facts["bytes"] else None


def table_bytes(table: pa.Table) -> bytes:
    """Return an Arrow table as bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def table_of(message: bytes) -> pa.Table:
    """Return the table that `table_bytes` made bytes of."""
    with pa.ipc.open_stream(pa.py_buffer(message)) as reader:
        return reader.read_all()


def steps_bytes(steps: Sequence[StepPlan]) -> bytes:
    """Return planned steps as bytes: the rows of a plan file."""
    return table_bytes(steps_to_arrow(steps))


def steps_of(message: bytes) -> list[StepPlan]:
    """Return the steps that `steps_bytes` made bytes of."""
    return list(steps_from_arrow(table_of(message)))
