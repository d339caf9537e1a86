"""Jobs that go wrong, for real: each ends within a minute, with one line that names rank and cause, and leaves nothing.

Three gloo ranks under torchrun follow a plan whose every micro-batch is one ring of all of them. Three is the least
that shows a victim beside the rank that failed and the one that talks to neither.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked_ranks import shared_by_scripts
from tests.patience import wait_until
from tests.ports import unused_port
from tests.training.small_runs import fcp_command, ranks_in, run_fcp, write_manifest, write_small_plan

pytestmark = pytest.mark.distributed

HOST = socket.gethostname()
# From the fault to the end of the job: a few seconds where nothing else runs, and half an hour where ranks wait for
# gloo's own time-out.
MOST_SECONDS = 300.0

# Attention alone is enough of a model to be in the middle of a ring.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from fcp_cli import runtime as fcp
from fcp_cli.plan.file import PlanReader

fault, rank = sys.argv[1], int(os.environ["RANK"])
plan = Path(os.environ["FCP_PLAN"])

def happens():
    Path("fault_at").write_text(str(time.time()))

if fault == "other-plan" and rank == 1:
    happens()
    plan = plan.with_name("other.parquet")
lengths = {}
for step in PlanReader(plan).steps():
    lengths.update(zip(step.sequences.tolist(), step.lengths.tolist()))
session = fcp.start(plan, lambda row: torch.zeros(lengths[row], dtype=torch.int64))

class Faulty:
    \"\"\"The ring's transport, until the fault strikes at its third hop.\"\"\"
    def __init__(self, inner):
        self.inner, self.hops = inner, 0
    def start(self, *hop):
        self.hops += 1
        if self.hops == 3:
            happens()
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a token of odd length")
        return self.inner.start(*hop)

if fault in ("killed", "raises") and rank == 1:
    session.transport = Faulty(session.transport)
weight = torch.nn.Parameter(torch.ones(4))
def remove_plan():
    session.world.all_reduce_sum(torch.zeros(1))
    if rank == 0:
        happens()
        plan.unlink()
    session.world.all_reduce_sum(torch.zeros(1))
if fault == "plan-gone-early":
    remove_plan()
for step in session.steps(fcp.GradientSync()):
    if fault == "plan-gone-late" and step.index == 1:
        remove_plan()
    if fault == "stuck" and step.index == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        session.world.all_reduce_sum(torch.zeros(1))  # every rank is
        print("stuck", file=sys.stderr, flush=True)
        time.sleep(3600)
    for batch in step:
        qkv = (batch.input_ids[0, :, None] * 0 + weight)[None, None]  # [1, 1 head, tokens, 4]
        batch.normalised(fcp.attention(qkv, qkv, qkv).sum()).backward()
    with torch.no_grad():  # the first of torch's own optimizers takes seconds to import its compiler
        weight -= 0.1 * weight.grad
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int
    lines: list[str]
    seconds: float

    @property
    def last(self) -> str:
        return self.lines[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    manifest = write_manifest(folder)
    for name, steps in (("plan.parquet", 3), ("early.parquet", 3), ("late.parquet", 3), ("other.parquet", 4)):
        write_small_plan(folder / name, manifest, steps=steps, num_ranks=3)
    (folder / "script.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def fails(folder: Path) -> Callable[..., Ended]:
    """Run the script with a fault to its end."""

    def run(fault: str, *words: str) -> Ended:
        (folder / "fault_at").unlink(missing_ok=True)
        done = run_fcp("launch", *words, "--", "script.py", fault, folder=folder, **shared_by_scripts())
        seconds = time.time() - float((folder / "fault_at").read_text())
        assert seconds < MOST_SECONDS
        wait_until(lambda: ranks_in(folder) == [])
        return Ended(status=done.returncode, lines=done.stderr.splitlines(), seconds=seconds)

    return run


def test_a_rank_killed_in_the_middle_of_a_ring_is_named_and_its_victims_are_not_shown(
    fails: Callable[..., Ended],
) -> None:
    ended = fails("killed")
    assert ended.status == 1
    assert ended.last.startswith(f"error: rank 1 on {HOST} was ended by signal 9 (out of memory?); its whole output")
    assert not [line for line in ended.lines if "Traceback" in line or "Connection" in line]


def test_a_rank_that_raises_in_the_middle_of_a_ring_has_the_last_word(fails: Callable[..., Ended]) -> None:
    ended = fails("raises")
    assert ended.status == 1
    assert ended.last.startswith(f"error: rank 1 on {HOST} failed: ValueError: a token of odd length; its whole output")
    assert ended.lines[-2] == "  ValueError: a token of odd length"
    assert f"last lines of rank 1 on {HOST}:" in ended.lines
    assert not [line for line in ended.lines if "Connection" in line]


def test_a_rank_with_another_plan_stops_the_job_before_the_first_step(fails: Callable[..., Ended]) -> None:
    ended = fails("other-plan")
    assert ended.status == 1
    assert "rank 1 has another plan than rank 0 under" in ended.last


def test_a_plan_deleted_before_the_ranks_opened_it_is_told_by_name(folder: Path, fails: Callable[..., Ended]) -> None:
    ended = fails("plan-gone-early", "--plan", "early.parquet")
    assert ended.status == 1
    assert f"there is no plan {folder / 'early.parquet'}; make one with 'fcp plan" in ended.last


@pytest.mark.full  # a whole job for what must not happen; the one deleted early fails
def test_a_plan_deleted_later_does_not_disturb_the_job_that_holds_it_open(
    folder: Path, fails: Callable[..., Ended]
) -> None:
    assert fails("plan-gone-late", "--plan", "late.parquet").status == 0
    assert not (folder / "late.parquet").exists()


def test_sigterm_to_a_job_that_hangs_ends_it_when_its_time_is_up(folder: Path) -> None:
    command = fcp_command("launch", "--grace", "2", "--", "script.py", "stuck")
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = iter(process.stderr)
        assert any(line == "stuck\n" for line in before)
        asked_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        printed = process.stderr.read()
        assert process.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - asked_at < MOST_SECONDS
    assert "the step did not end within 2 s: stopping at once (see --grace)" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("error: interrupted; fcp found no checkpoint of the script; start again with: fcp")
    assert last.endswith("-- script.py stuck")
    wait_until(lambda: ranks_in(folder) == [])


@pytest.fixture(scope="module")
def address() -> str:
    """An address of this machine that other machines could reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network but loopback")
        return str(probe.getsockname()[0])


def node(folder: Path, address: str, port: int, rank: int) -> Ended:
    """One of three nodes of one process each, which waits 3 seconds for the others."""
    begin = time.monotonic()
    words = ("--nodes", "3", "--node-rank", str(rank), "--master-addr", address, "--master-port", str(port))
    done = run_fcp(
        "launch", *words, "--join-timeout", "3", "--run-dir", "nodes", "--", "script.py", "none", folder=folder
    )
    seconds = time.monotonic() - begin
    wait_until(lambda: ranks_in(folder) == [])
    return Ended(status=done.returncode, lines=done.stderr.splitlines(), seconds=seconds)


def test_a_port_in_use_is_found_before_anything_is_started(folder: Path, address: str) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        ended = node(folder, address, port, rank=0)
    assert ended.status == 1
    assert (
        f"error: --master-port {port} of {HOST} is in use by another process; give all nodes another one, or find who "
        f"has it with: ss -ltnp 'sport = :{port}'"
    ) in ended.lines
    assert not (folder / "nodes").exists()


@pytest.mark.full  # waits out its time, as the next one does
def test_a_node_0_that_nobody_started_is_told_in_one_line(folder: Path, address: str) -> None:
    port = unused_port()
    ended = node(folder, address, port, rank=1)
    assert (ended.status, ended.seconds < MOST_SECONDS) == (1, True)
    assert (
        f"waiting for node 0: nothing listens at {address}:{port} yet; run 'fcp launch' there; gives up after 3 s "
        "(--join-timeout)"
    ) in ended.lines
    assert ended.last.startswith(f"error: node 0 does not answer at {address}:{port}; start it, make sure that")


def test_nodes_that_never_come_are_told_in_one_line(folder: Path, address: str) -> None:
    ended = node(folder, address, unused_port(), rank=0)
    assert (ended.status, ended.seconds < MOST_SECONDS) == (1, True)
    assert ended.last.startswith("error: only 1 of 3 nodes came together in time, without 1, 2; start the others")
