"""What messages tell a user to type can be pasted: each suggestion of a wrong command is run as it is printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.planning_folder import EIGHT_RANKS, fcp, write_dataset

_WORDS = r"fcp [a-z](?:(?<= )'[^']*'|[^'`;)\n])*"  # a word in quotes may hold blanks
_SUGGESTED = re.compile(rf"(?:'|`|next: |run: |with: )({_WORDS})")
_FLAGS = re.compile(r"(?:add|or|with|lower|pass|devices:) ((?:--[a-z-]+(?: [\w.,]+)? ?)+)")


def texts(folder: Path) -> None:
    pq.write_table(pa.table({"text": ["a text", "another one"]}), folder / "texts.parquet")


def folder_of_texts(folder: Path) -> None:
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("a text\n")


def two_columns(folder: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "lenght": [30, 40]}), folder / "data.parquet")


def named_with_blanks(folder: Path) -> None:
    pq.write_table(pa.table({"text": ["a text", "another one"]}), folder / "my texts.parquet")
    write_dataset(folder)
    (folder / "dataset.parquet").rename(folder / "my lengths.parquet")
    (folder / "my folder").mkdir()
    (folder / "my folder" / "a.txt").write_text("a text\n")


def records(folder: Path) -> None:
    (folder / "data.jsonl").write_text('{"text": "a text"}\n{"text": "b"}\n')


def equal_profile(folder: Path) -> None:
    write_dataset(folder)
    (folder / "profile.yaml").unlink()
    assert not fcp("profile", "--analytic", "--model", "qwen3-8b", "--cluster", "h100-1x8", cwd=folder).returncode


def planned(folder: Path) -> None:
    write_dataset(folder)
    assert not fcp("plan", "dataset.parquet", *EIGHT_RANKS, cwd=folder).returncode


def planned_for_64(folder: Path) -> None:
    write_dataset(folder)
    options = ("--model", "qwen3-8b", "--cluster", "h100-8x8", "--global-batch-size", "24")
    assert not fcp("plan", "dataset.parquet", *options, cwd=folder).returncode


def long_rows(folder: Path) -> None:
    pq.write_table(pa.table({"length": np.array([2_000_000, *[300] * 47])}), folder / "dataset.parquet")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Words that fcp refuses, or follows with a suggestion; `adds` where it suggests options of the same command."""

    make: Callable[[Path], object]
    words: str
    adds: bool = False


_SMALL = "--ranks 8 --ranks-per-node 4 --tokens-per-rank 4096"
CASES = {
    "texts planned": Case(make=texts, words="plan texts.parquet"),
    "a folder of texts planned": Case(make=folder_of_texts, words="plan corpus"),
    "texts in lines planned": Case(make=records, words="plan data.jsonl"),
    "a misspelt column": Case(make=two_columns, words=f"plan data.parquet {_SMALL} --global-batch-size 2", adds=True),
    "a sequence too long": Case(
        make=long_rows, words="plan dataset.parquet --model qwen3-8b --cluster h100-2x8 --global-batch-size 24", adds=True
    ),
    "a plan inspected as a manifest": Case(make=planned, words="manifest show plan.parquet"),
    "a manifest inspected as a plan": Case(make=write_dataset, words="inspect dataset.parquet"),
    "a profile of other settings": Case(
        make=equal_profile, words="plan dataset.parquet --profile profile.yaml --recompute full --global-batch-size 24"
    ),
    "a profile of another cut": Case(
        make=equal_profile, words="plan dataset.parquet --profile profile.yaml --tensor-parallel 2 --global-batch-size 24"
    ),
    "after a plan": Case(make=write_dataset, words=f"plan dataset.parquet {_SMALL} --global-batch-size 24 --model qwen3-tiny"),
    "after a manifest": Case(make=folder_of_texts, words="manifest build corpus -o made.parquet"),
    "blanks: texts planned": Case(make=named_with_blanks, words="plan 'my texts.parquet'"),
    "blanks: a folder of texts planned": Case(make=named_with_blanks, words="plan 'my folder'"),
    "blanks: lengths inspected as a plan": Case(make=named_with_blanks, words="inspect 'my lengths.parquet'"),
    "blanks: after a manifest": Case(make=named_with_blanks, words="manifest build 'my folder' -o 'my own.parquet'"),
    "blanks: after a plan": Case(
        make=named_with_blanks,
        words=f"plan 'my lengths.parquet' {_SMALL} --global-batch-size 24 --model qwen3-tiny -o 'my plan.parquet'",
    ),
    "blanks: after a profile": Case(
        make=write_dataset, words="profile --analytic --model qwen3-8b --cluster h100-1x8 -o 'my p.yaml'"
    ),
    "a launch without a plan": Case(make=write_dataset, words="launch --model qwen3-tiny"),
    "a plan for more ranks than are here": Case(make=planned_for_64, words="launch --model qwen3-8b"),
    "after a profile": Case(make=write_dataset, words="profile --analytic --model qwen3-8b --cluster h100-1x8 -o p.yaml"),
}  # fmt: skip


def suggestions(case: Case, said: str) -> list[list[str]]:
    """The commands of a message; `adds`: the same command with each set of options that it names."""
    said = " ".join(said.split())
    if case.adds:
        found = [flags.split() for flags in _FLAGS.findall(said)]
        return [[*shlex.split(case.words), *flags] for flags in found]
    commands = (shlex.split(command.rstrip(". ")) for command in _SUGGESTED.findall(said))
    # Words in capitals stand for what only the user knows; a measurement replaces the profile, as it is asked to.
    known = (words[1:] for words in commands if not any(word.isupper() and len(word) > 2 for word in words))
    return [words for words in known if words != ["profile"]]


@pytest.mark.processes  # a launch asks for the versions of libraries
@pytest.mark.parametrize("name", CASES)
def test_what_is_suggested_runs_as_printed_and_overwrites_nothing(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = fcp(*shlex.split(case.words), cwd=tmp_path)
    made = {path for path in tmp_path.rglob("*") if path.is_file()} - set(before)
    found = suggestions(case, done.stderr)
    assert found, done.stderr
    for words in found:
        if words[0] == "launch":
            words = [*words, "--dry-run"]
        again = fcp(*words, cwd=tmp_path)
        assert again.returncode == 0, (words, done.stderr, again.stderr)
        for path in set(tmp_path.rglob("*.parquet")) - set(before) - made:
            path.unlink()  # of this suggestion, not of the next
    assert {path: path.read_bytes() for path in before} == before
