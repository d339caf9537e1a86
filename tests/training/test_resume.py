"""The exactness of training, on gloo ranks started as a user starts them: with `fcp launch`.

One run goes straight through. Another is killed after a checkpoint, resumed from it, and stopped by Ctrl-C. As far as
it came it must agree in every bit: losses, gradient norms, weights and optimizer states.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fcp_cli.models.cluster import shipped_profile_path
from fcp_cli.runs.checkpoints import checkpoints, read_header
from fcp_cli.util import processes
from tests.forked_ranks import is_rank, shared, without_forks
from tests.patience import wait_until
from tests.runs.records import read_metrics
from tests.runtime.launch import ROOT
from tests.training.small_runs import ranks_in, run_fcp, write_manifest, write_small_plan

pytestmark = [pytest.mark.distributed, pytest.mark.hf]

STEPS = 12
# More than a run that is to be stopped could take while somebody slow reads a line: twenty seconds on a quick machine.
LONG_STEPS = 1000
SETTINGS = ("--model", "qwen3-tiny", "--learning-rate", "3e-3", "--log-every", "1")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launch ended, once none of its ranks was left: exit status, and all that it printed to stderr."""

    status: int
    printed: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it after `fcp manifest build` and `fcp plan`."""
    folder = tmp_path_factory.mktemp("runs")
    manifest = write_manifest(folder)
    write_small_plan(folder / "plan.parquet", manifest, steps=4)
    write_small_plan(folder / "long.parquet", manifest, steps=LONG_STEPS)
    write_small_plan(folder / "waves.parquet", manifest, steps=4, sync="microbatch", num_ranks=2)
    return folder


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    """The first steps, with a checkpoint of each to compare with."""
    every = ("--plan", "long.parquet", "--steps", str(STEPS), "--checkpoint-every", "1", "--keep", str(STEPS))
    ended = run_fcp("launch", *SETTINGS, *every, folder=folder)
    assert ended.returncode == 0, ended.stderr
    return folder / "runs" / "qwen3-tiny-001"


@pytest.fixture(scope="module")
def broken(folder: Path) -> Path:
    return folder / "broken"


listening: set[str] = set()  # of the job of `killed`, while it ran


def listening_addresses(pids: list[int]) -> set[str]:
    """Return the addresses, as the kernel writes them, on which processes listen."""
    held: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            held.update(str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]
    ]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


@pytest.fixture(scope="module")
def killed(folder: Path, broken: Path) -> Ended:
    """One rank is killed outright, two steps after the checkpoint of step 5, or a little later."""
    every = ("--checkpoint-every", "5", "--keep", str(LONG_STEPS))
    words = (*SETTINGS, *every, "--plan", "long.parquet", "--run-dir", str(broken))
    with launched(*words, folder=folder, environment={**os.environ, **shared()}) as (job, read_to):
        read_to("step 7/")
        listening.update(listening_addresses([job.pid, *processes.descendants(job.pid), *ranks_in(folder)]))
        (rank_2,) = (pid for pid in ranks_in(folder) if is_rank(pid, 2))
        os.kill(rank_2, signal.SIGKILL)
        return read_to(None)


@pytest.fixture(scope="module")
def interrupted(folder: Path, broken: Path, killed: Ended) -> Ended:
    """The run goes on from the checkpoint, and Ctrl-C stops it a few steps later."""
    # Ctrl-C is handed to torchrun's own children.
    environment = without_forks()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    words = ("--resume", "--run-dir", str(broken))
    with launched(*words, folder=folder, environment=environment, module="tests.chaos.forks") as (process, read_to):
        read_to("step ")  # of whichever checkpoint was the last when the rank was killed
        process.send_signal(signal.SIGINT)
        return read_to(None)


@contextmanager
def launched(
    *words: str, folder: Path, environment: dict[str, str], module: str = "fcp_cli"
) -> Iterator[tuple[subprocess.Popen[str], Callable[[str | None], Ended]]]:
    """`fcp launch ...`, and a function that reads its lines up to one that begins with a text, or to the end."""
    printed: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", module, "launch", *words],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:

        def read_to(beginning: str | None) -> Ended:
            assert process.stderr is not None
            for line in process.stderr:
                printed.append(line)
                if beginning is not None and line.startswith(beginning):
                    return Ended(status=0, printed=line)
            assert beginning is None, "".join(printed)
            status = process.wait()
            wait_until(lambda: ranks_in(folder) == [])
            return Ended(status=status, printed="".join(printed))

        try:
            yield process, read_to
        finally:
            processes.kill_tree(process.pid)


def steps_of(run_dir: Path) -> list[tuple[Any, ...]]:
    """What must not depend on interruptions, per step."""
    return [
        tuple(record[name] for name in ("step", "loss", "tokens", "grad_norm", "learning_rate"))
        for record in read_metrics(run_dir / "metrics.jsonl")
        if record["kind"] == "step"
    ]


def tensors_of(checkpoint: Path, name: str = "state.safetensors") -> dict[str, torch.Tensor]:
    """Weights and optimizer states."""
    from safetensors.torch import load_file

    return load_file(checkpoint / name)


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_same_shards(ours: Path, theirs: Path, *, ranks: int) -> None:
    """Every rank's part of the checkpoint of step 4 is the same in two runs, bit for bit."""
    for rank in range(ranks):
        shards = (
            tensors_of(run / "checkpoints" / "step-00000004", f"state-{rank:05d}.safetensors") for run in (ours, theirs)
        )
        assert same_bits(*shards)


def test_a_killed_rank_ends_the_job_and_is_named(killed: Ended) -> None:
    assert killed.status == 1
    assert (
        f"error: rank 2 on {socket.gethostname()} was ended by signal 9 (out of memory?); its whole output is in "
        in (killed.printed)
    )
    assert re.search(
        r"^failed; \d+ steps are saved, continue with: fcp launch --run-dir \S+ --resume$", killed.printed, re.M
    )
    assert "Traceback" not in killed.printed


def test_ctrl_c_saves_says_how_to_go_on_and_leaves_nothing_running(broken: Path, interrupted: Ended) -> None:
    assert interrupted.status == 130, interrupted.printed
    saved = len(steps_of(broken))
    assert 6 <= saved < LONG_STEPS
    assert interrupted.printed.splitlines()[-1] == (
        f"error: interrupted; {saved} steps are saved, continue with: fcp launch --run-dir {broken.name} --resume"
    )
    *every_fifth, last = [path.name for path in checkpoints(broken / "checkpoints")]
    assert every_fifth == [f"step-{step:08d}" for step in range(5, saved, 5)]
    assert last == f"step-{saved:08d}"


def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not(
    straight: Path, broken: Path, interrupted: Ended
) -> None:
    steps = steps_of(broken)
    assert [step[0] for step in steps] == list(range(len(steps)))  # none is missing, none appears twice
    assert steps[:STEPS] == steps_of(straight)[: len(steps)]
    ours, theirs = ({path.name: path for path in checkpoints(run / "checkpoints")} for run in (broken, straight))
    for name in ours.keys() & theirs.keys():  # all, unless it was stopped very late
        assert same_bits(tensors_of(ours[name]), tensors_of(theirs[name]))


def cut(run_dir: Path, finished: Path, *, step: int) -> None:
    """A run that stopped after `step`: a copy of a finished one whose later checkpoints were never made."""
    shutil.copytree(finished, run_dir)
    for path in checkpoints(run_dir / "checkpoints"):
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)


def go_on(folder: Path, run_dir: str, *, ranks: int, steps: int) -> list[tuple[Any, ...]]:
    """Plan what is left of a run for other ranks, resume it, and return all its steps."""
    profile = shipped_profile_path("qwen3-tiny")
    words = ("--ranks", str(ranks), "--solver", "fcp-paper", "--profile", str(profile), "-o", f"{run_dir}.parquet")
    planned = run_fcp("plan", "--continue-from", run_dir, *words, folder=folder)
    assert planned.returncode == 0, planned.stderr
    command = f"fcp launch --run-dir {run_dir} --resume --plan {run_dir}.parquet"
    assert planned.stderr.splitlines()[-1].startswith(f"wrote {run_dir}.parquet; next: {command}")
    ended = run_fcp(*command.split()[1:], "--steps", str(steps), folder=folder)
    assert ended.returncode == 0, ended.stderr
    return steps_of(folder / run_dir)


def assert_same_trajectory(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]]) -> None:
    """Same steps, tokens and learning rates; losses and gradient norms as near as float32 sums in another order are."""
    for (step, loss, tokens, norm, rate), wanted in zip(ours, theirs, strict=True):
        assert (step, tokens, rate) == (wanted[0], wanted[2], wanted[4])
        assert loss == pytest.approx(wanted[1], rel=2e-6)
        assert norm == pytest.approx(wanted[3], rel=1e-4)


def test_a_run_that_loses_a_rank_goes_on_as_if_nothing_had_happened(folder: Path, straight: Path) -> None:
    cut(folder / "fewer", straight, step=3)
    assert_same_trajectory(go_on(folder, "fewer", ranks=3, steps=6), steps_of(straight)[:6])


def test_metrics_have_the_promised_fields(straight: Path) -> None:
    run, *steps = read_metrics(straight / "metrics.jsonl")
    assert {
        name: run[name] for name in ("format", "kind", "num_ranks", "ranks_per_node", "sync", "model", "device")
    } == {
        "format": "fcp-metrics/1",
        "kind": "run",
        "num_ranks": 4,
        "ranks_per_node": 4,
        "sync": "iteration",
        "model": "qwen3-tiny",
        "device": "cpu",
    }
    assert {"plan", "plan_hash", "device_name", "torch", "started"} <= run.keys()
    assert [step["warm_up"] for step in steps] == [True] + [False] * (STEPS - 1)
    for step in steps:
        assert [rank["rank"] for rank in step["ranks"]] == [0, 1, 2, 3]
        for rank in step["ranks"]:
            # A step's seconds are rank 0's; a rank that left the step before a moment earlier may be busy for longer.
            assert rank["idle_seconds"] == pytest.approx(max(0.0, step["seconds"] - rank["busy_seconds"]))
            orders = [microbatch["order"] for microbatch in rank["micro_batches"]]
            assert orders == sorted(orders)
            for microbatch in rank["micro_batches"]:
                assert microbatch.keys() == {
                    "order", "degree", "tokens", "predicted_seconds", "start_seconds", "seconds"
                }  # fmt: skip
    # Step 0 of the plan: ranks 0-2, rank 3, ranks 0 and 3, ranks 1 and 2.
    assert [[m["order"] for m in rank["micro_batches"]] for rank in steps[0]["ranks"]] == [
        [0, 2],
        [0, 3],
        [0, 3],
        [1, 2],
    ]
    assert [m["degree"] for m in steps[0]["ranks"][3]["micro_batches"]] == [1, 2]


def test_the_loss_falls_on_real_text(straight: Path) -> None:
    losses = [step[1] for step in steps_of(straight)]
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 256: it knows nothing
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.full  # test_zero.py resumes every stage, on as many ranks
def test_a_sharded_run_resumes_bit_for_bit_and_on_more_ranks(folder: Path) -> None:
    words = ("launch", "--plan", "waves.parquet", "--model", "qwen3-tiny", "--checkpoint-every", "2")
    ended = run_fcp(*words, "--run-dir", "whole", folder=folder)
    assert ended.returncode == 0, ended.stderr
    shutil.copytree(folder / "whole", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / "step-00000004")
    ended = run_fcp("launch", "--run-dir", "resumed", "--resume", folder=folder)
    assert ended.returncode == 0, ended.stderr
    assert steps_of(folder / "resumed") == steps_of(folder / "whole")
    assert_same_shards(folder / "resumed", folder / "whole", ranks=2)
    cut(folder / "more", folder / "whole", step=2)
    assert_same_trajectory(go_on(folder, "more", ranks=3, steps=4), steps_of(folder / "whole"))


@pytest.mark.full  # test_zero.py resumes under other stages
def test_a_run_goes_on_with_its_optimizer_shared_out_where_none_was(folder: Path, straight: Path) -> None:
    """Under one command; every stage on what every other one saved, bit for bit: test_zero.py."""
    cut(folder / "shared", straight, step=3)
    ended = run_fcp("launch", "--run-dir", "shared", "--resume", "--zero", "1", "--steps", "5", folder=folder)
    assert ended.returncode == 0, ended.stderr
    assert_same_trajectory(steps_of(folder / "shared"), steps_of(straight)[:5])
    assert read_header(folder / "shared" / "checkpoints" / "step-00000005").sharding == "sharded"


def test_a_job_on_one_machine_listens_on_loopback_alone(killed: Ended) -> None:
    assert listening == {"0100007F"}


def test_an_export_that_fails_loses_no_checkpoint(folder: Path) -> None:
    run = folder / "spoilt"
    run.mkdir()
    (run / "model").write_text("in the way of the export", encoding="utf-8")
    ended = run_fcp("launch", *SETTINGS, "--plan", "plan.parquet", "--steps", "2", "--run-dir", "spoilt", folder=folder)
    assert ended.returncode != 0
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step-00000002"]
    assert not list((run / "checkpoints").glob(".*"))
