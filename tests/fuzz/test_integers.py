"""Every whole number that an option takes, at the edges of 64 bits: one line or an answer, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from fcp_cli.cli.app import app
from tests.cli.planning_folder import fcp, write_dataset
from tests.fuzz.folder import SeedFolder
from tests.fuzz.judgement import judged
from tests.fuzz.kind import Input
from tests.fuzz.planning_kinds import PLANS, run_fcp
from tests.fuzz.run_kinds import write_runs
from tests.manifest.datasets import write_jsonl

# A launch and a self-test look for devices.
pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.processes]

_PLANNED = "--ranks 4 --ranks-per-node 2 --tokens-per-rank 8192 --global-batch-size 16"
# Verb -> a quick command, to which an option is added. Those of a file that is missing end after their options are read.
COMMANDS = {
    "plan": f"plan dataset.parquet --solver static {_PLANNED} -o out.parquet",
    "compare": f"compare dataset.parquet --solvers static {_PLANNED} --json",
    "launch": "launch --plan plan.parquet --model qwen3-tiny --synthetic --dry-run --json",
    "profile": "profile --analytic --model qwen3-8b --cluster example-8x8 -o out.yaml --json",
    "profile fit": "profile fit runs/tiny-001/metrics.jsonl --plan plan.parquet -o out.yaml",
    "profile show": "profile show profile.yaml --json",
    "inspect": "inspect plan.parquet --json",
    "manifest build": "manifest build texts.jsonl -o out.parquet",
    "selftest": "selftest --nodes 2 --ranks 2",
    "verify": "verify missing.parquet",
    "watch": "watch runs/tiny-001 --once",
}
EDGES = (2**63 - 1, 2**63, 10**30, -1, 0)


def integer_options(command: Any, *verbs: str) -> Iterator[tuple[str, str]]:
    """Yield (verb, flag) of every option that takes a whole number, or several."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from integer_options(inner, *verbs, name)
    for parameter in command.params:
        if isinstance(parameter.default, int) and not isinstance(parameter.default, bool):
            is_share = parameter.metavar == "N|X"  # below 1 a share: a float, which 64 bits do not bound
            is_number = not is_share and not getattr(parameter, "count", False)
        else:
            is_number = parameter.metavar in ("N", "N,...", "T", "P", "V", "E", "SECONDS", "MICROBATCH")
        if is_number and parameter.param_type_name == "option":
            yield " ".join(verbs), next(flag for flag in parameter.opts if flag.startswith("--"))


OPTIONS = list(integer_options(typer.main.get_command(app)))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> SeedFolder:
    """What the commands read, alone: the seeds of all kinds take many times as long."""
    folder = tmp_path_factory.mktemp("seeds")
    write_dataset(folder, sequences=32)
    run_fcp(folder, f"plan {PLANS['plan.parquet']} -o plan.parquet")
    write_runs(folder)
    write_jsonl(folder / "texts.jsonl", [{"text": "word " * i, "id": i} for i in range(1, 13)])
    return SeedFolder(folder)


def test_every_command_with_whole_numbers_is_tried() -> None:
    assert {verb for verb, _ in OPTIONS} == set(COMMANDS)
    assert len(OPTIONS) > 68


@pytest.mark.parametrize(("verb", "flag"), OPTIONS)
def test_an_option_takes_numbers_at_the_edges_or_says_what_it_takes(seeds: SeedFolder, verb: str, flag: str) -> None:
    words = {edge: (*COMMANDS[verb].split(), f"{flag}={edge}") for edge in EDGES}
    found = {edge: judged(Input(name=f"{flag}={edge}", words=typed), seeds)[1] for edge, typed in words.items()}
    assert {edge: wrong for edge, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(("verb", "flag"), OPTIONS)
def test_a_variable_beyond_64_bits_is_refused_with_its_name(seeds: SeedFolder, verb: str, flag: str) -> None:
    if flag in COMMANDS[verb]:
        return  # a flag beats its variable
    name = f"FCP_{verb}_{flag[2:]}".replace(" ", "_").replace("-", "_").upper()
    result = fcp(*COMMANDS[verb].split(), cwd=seeds.path, **{name: str(2**63)})
    assert (result.returncode, f"(set by {name})" in result.stderr) == (2, True), result.stderr
