"""Messages between a training job and its planner process: a line of JSON followed by an Arrow table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

import pyarrow as pa

from fcp_cli.plan.file.schema import steps_from_arrow, steps_to_arrow
from fcp_cli.plan.step import StepPlan


class Message(NamedTuple):
    """One message: `kind` and other facts, and the bytes of a table, empty if it has none."""

    facts: Mapping[str, Any]
    table: bytes

    @property
    def kind(self) -> str:
        return str(self.facts["kind"])


def write_message(pipe: IO[bytes], facts: Mapping[str, Any], table: bytes = b"") -> None:
    """Write one message and flush the pipe."""
    pipe.write(json.dumps({**facts, "bytes": len(table)}).encode() + b"\n")
    pipe.write(table)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> Message | None:
    """Return the next message, or None at the end of the pipe or if the message is truncated."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    facts = json.loads(line)
    table = pipe.read(facts["bytes"])
    return Message(facts, table) if len(table) == facts["bytes"] else None


def table_bytes(table: pa.Table) -> bytes:
    """Serialize an Arrow table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def table_of(message: bytes) -> pa.Table:
    """Deserialize the output of `table_bytes`."""
    with pa.ipc.open_stream(pa.py_buffer(message)) as reader:
        return reader.read_all()


def steps_bytes(steps: Sequence[StepPlan]) -> bytes:
    """Serialize planned steps as the rows of a plan file."""
    return table_bytes(steps_to_arrow(steps))


def steps_of(message: bytes) -> list[StepPlan]:
    """Deserialize the output of `steps_bytes`."""
    return list(steps_from_arrow(table_of(message)))
