"""A journal of a job that plans while it trains, after a kill, on a dying disk, or in the hands of somebody else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fcp_cli.errors import FcpError, PlanError
from fcp_cli.plan.file import PlanReader, steps_to_arrow
from fcp_cli.planning.journal import StreamJournal
from fcp_cli.util.records import read_records, table_content, table_of_content, write_record
from tests.planning.examples import PROFILE
from tests.planning.test_stream import LENGTHS, batches_of, planned, settings_for

Windows = list[bytes]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of two starts left: steps 0 to 5, then 4 to 7."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "profile.yaml").write_text(PROFILE, encoding="utf-8")
    online = settings_for(folder / "profile.yaml", global_batch_size=8)
    batches = batches_of(LENGTHS, online)
    list(planned(folder / "plan.parquet", online, batches[:6]))
    list(planned(folder / "plan.parquet", online, batches[4:], first_step=4, first_sequence=32))
    return folder / ".plan.parquet.online"


@pytest.fixture
def journal(kept: Path, tmp_path: Path) -> StreamJournal:
    shutil.copytree(kept, tmp_path / kept.name)
    return StreamJournal(tmp_path / "plan.parquet")


@pytest.mark.lengthy
def test_a_file_cut_off_anywhere_is_read_up_to_its_last_whole_window(journal: StreamJournal) -> None:
    part = journal.folder / "000001.windows"
    whole = part.read_bytes()
    seen = set()
    for size in range(0, len(whole), 101):
        part.write_bytes(whole[:size])
        steps = [step.step for step in journal.steps()]
        assert steps == list(range(len(steps)))
        seen.add(len(steps))
    assert seen == {4, 5, 6, 7}  # the first start's six, until the second says where it begins


@pytest.mark.lengthy
@pytest.mark.parametrize("name", ["metadata.json", "000000.windows", "000001.windows"])
def test_a_byte_that_changed_is_refused_in_one_line(journal: StreamJournal, name: str) -> None:
    file = journal.folder / name
    whole = file.read_bytes()
    sound = [step.to_dict() for step in journal.steps()]
    generator = np.random.default_rng(0)
    for at in generator.integers(0, len(whole), 60).tolist():
        changed = bytearray(whole)
        changed[at] ^= 1 << int(generator.integers(8))
        file.write_bytes(changed)
        with pytest.raises(FcpError) as raised:
            list(journal.steps())
        assert "\n" not in str(raised.value)
    file.write_bytes(whole)
    assert [step.to_dict() for step in journal.steps()] == sound


def rewrite(journal: StreamJournal, edit: Callable[[Windows], Windows]) -> None:
    """Change the records of the first start, with digests that fit."""
    part = journal.folder / "000000.windows"
    contents = edit(list(read_records(part)))
    with part.open("wb") as file:
        for content in contents:
            write_record(file, content)


def with_steps(change: Callable[[Any], Any]) -> Callable[[Windows], Windows]:
    return lambda contents: [*contents[:2], table_content(change(table_of_content(contents[2]))), *contents[3:]]


def with_column(name: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        at = table.schema.get_field_index(name)
        values = [value(old) for old in table.column(name).to_pylist()]
        return table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))

    return change


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (with_steps(with_column("ranks", lambda ranks: [rank + 8 for rank in ranks])), r"rank \d+ of a job of 8"),
        (with_steps(with_column("sequences", lambda rows: [row + 99 for row in rows])), "of a manifest of 8 rows"),
        (with_steps(with_column("lengths", lambda lengths: lengths[1:])), "as many sequences as lengths are needed"),
        (with_steps(with_column("lengths", lambda lengths: [0] * len(lengths))), "has 0 tokens"),
        (with_steps(with_column("seconds", lambda _: float("nan"))), "seconds is nan"),
        (with_steps(with_column("step", lambda _: 3)), "step 3 stands in place of step 0"),
        (with_steps(lambda table: table.drop_columns(["wave"])), "it does not have the columns of steps"),
        (lambda contents: [*contents[:2], b"ARROW1", *contents[3:]], r"000000\.windows is damaged"),
        (lambda contents: [contents[0], contents[2], *contents[2:]], "its sequences have no column length of int64"),
        (lambda contents: contents[:3], r"000001\.windows is damaged: it begins with step 4, after step 0"),
        (lambda contents: [b'{"first_step": -1, "first_sequence": 0}', *contents[1:]], "first_step is -1; it must be"),
        (lambda contents: [b"{}", *contents[1:]], "first_step is missing"),
        (lambda contents: [b"[" * 9999, *contents[1:]], "it is nested more than 64 deep"),
    ],
)
def test_values_that_no_step_can_have_never_reach_compiled_code(
    journal: StreamJournal, edit: Callable[[Windows], Windows], message: str
) -> None:
    rewrite(journal, edit)
    with pytest.raises(PlanError, match=message) as raised:
        journal.finish()
    assert "\n" not in str(raised.value) and not journal.path.exists()


def test_the_steps_of_a_journal_become_the_plan(journal: StreamJournal) -> None:
    sound = [step.to_dict() for step in journal.steps()]
    journal.finish()
    assert [step.to_dict() for step in PlanReader(journal.path).steps()] == sound
    assert steps_to_arrow(list(PlanReader(journal.path).steps())).num_rows > 8
