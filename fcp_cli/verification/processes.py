"""Runs a plan's ranks as gloo processes, started with torchrun.

As a program (`python -m fcp_cli.verification.processes PLAN FOLDER`, under torchrun), it is one of the ranks and writes
its result or its error line to the folder.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from fcp_cli.errors import FcpError, RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.machine.torchrun import torchrun_argv
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.runtime.communication.world import leave_process_group
from fcp_cli.runtime.session.start import start
from fcp_cli.verification.recording import BACKEND, LabellingTransport, ProcessRecorder
from fcp_cli.verification.replay import Replayed, replay_rank, synthetic_tokens, tiny_config


def replay_processes(plan: Path) -> list[Replayed]:
    """Replay all steps of a plan with a process per rank; return each rank's losses and gradients."""
    folder = plan.parent
    num_ranks = PlanReader(plan).metadata.num_ranks
    done = subprocess.run(
        [*torchrun_argv(num_ranks), "-m", "fcp_cli.verification.processes", str(plan), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunError(f"replaying the plan failed: {_reason(folder, done.stderr)}")
    # Pickle is safe here: our own processes wrote these files to our own temporary folder.
    return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(num_ranks)]


def _reason(folder: Path, stderr: str) -> str:
    for path in sorted(folder.glob("rank-*.error")):
        return path.read_text(encoding="utf-8")
    return (stderr.strip().splitlines() or ["torchrun printed nothing"])[-1]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pickle"


def run_rank(plan: Path, folder: Path) -> None:
    """Replay the plan as one of its ranks, and write the result or the error to the folder."""
    config, recorder = tiny_config(plan), ProcessRecorder()
    torch.set_num_threads(1)
    recorder.register()
    dist.init_process_group(BACKEND)
    try:
        with start(plan, synthetic_tokens(plan, config.vocab_size), device=torch.device("cpu")) as session:
            session.transport = LabellingTransport(session.transport, recorder)
            replayed = replace(replay_rank(session, config), operations=recorder.operations)
            _result(folder, session.rank).write_bytes(pickle.dumps(replayed))
        leave_process_group()
    except FcpError as error:
        write_text_atomically(folder / f"rank-{os.environ['RANK']}.error", str(error))
        raise


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), Path(sys.argv[2]))
