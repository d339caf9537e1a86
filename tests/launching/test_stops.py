"""SIGTERM to `fcp launch`: each kind of script stops and saves in its own way, and what is said about it is true."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.training.small_runs import fcp_command, ranks_in, write_manifest, write_small_plan

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="handlers are seen through /proc"),
]

BEGIN = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
def save(step):
    if rank == 0:
        Path("checkpoint").write_text(str(step))
def begun(step):
    if step == 1:
        Path(f"up-{rank}").touch()
"""
LOOP = """
import torch
from fcp_cli import runtime as fcp
from fcp_cli.plan.file import PlanReader
lengths = {}
for step in PlanReader(Path(os.environ["FCP_PLAN"])).steps():
    lengths.update(zip(step.sequences.tolist(), step.lengths.tolist()))
session = fcp.start(fetch=lambda row: torch.zeros(lengths[row], dtype=torch.int64))
weight = torch.nn.Parameter(torch.ones(4))
for step in session.steps(fcp.GradientSync()):
    for batch in step:
        qkv = (batch.input_ids[0, :, None] * 0 + weight)[None, None]  # [1, 1 head, tokens, 4]
        batch.normalised(fcp.attention(qkv, qkv, qkv).sum()).backward()
    time.sleep(0.1)
    begun(step.index)
    if ASKS and fcp.stopping():
        save(session.next_step)
        break
"""
OWN_HANDLER = """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
for step in range(100_000):
    begun(step)
    time.sleep(0.02)
    if asked:
        save(step)
        break
"""


def stopped(folder: Path, script: str, *words: str) -> tuple[int, list[str]]:
    """Start a script on two ranks, send fcp SIGTERM in its second step; return exit status and what fcp said."""
    write_small_plan(folder / "plan.parquet", write_manifest(folder), steps=600, num_ranks=2)
    (folder / "script.py").write_text(BEGIN + script)
    command = fcp_command("launch", "--grace", "200", *words, "--", "script.py")
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as fcp:
        wait_until(lambda: len(list(folder.glob("up-*"))) == 2 or fcp.poll() is not None)
        fcp.terminate()
        assert fcp.stderr is not None
        said = fcp.stderr.read().splitlines()
    wait_until(lambda: ranks_in(folder) == [])
    return fcp.returncode, said


def test_a_loop_that_asks_whether_to_stop_ends_its_step_on_all_ranks_and_saves(tmp_path: Path) -> None:
    status, said = stopped(tmp_path, f"ASKS = True\n{LOOP}")
    assert status == 143
    assert "stopping at the end of this step; press Ctrl-C again to stop at once" in said
    assert int((tmp_path / "checkpoint").read_text()) >= 2
    assert said[-1].startswith("error: interrupted; the script ended by itself; continue with: fcp")


def test_a_loop_that_never_asks_is_interrupted_and_told_how_to_save(tmp_path: Path) -> None:
    status, said = stopped(tmp_path, f"ASKS = False\n{LOOP}")
    assert status == 143
    assert (
        "interrupting the script: it never asks fcp.stopping(), so steps since its last checkpoint are lost; "
        "press Ctrl-C again to stop at once"
    ) in said
    assert not (tmp_path / "checkpoint").exists()
    assert said[-1].startswith("error: interrupted; fcp found no checkpoint of the script; start again with: fcp")


def test_a_script_that_handles_sigterm_gets_it(tmp_path: Path) -> None:
    status, said = stopped(tmp_path, OWN_HANDLER, "--inject", "none")
    assert status == 143
    assert "the script handles SIGTERM, which was passed on to it; press Ctrl-C again to stop at once" in said
    assert int((tmp_path / "checkpoint").read_text()) >= 1
