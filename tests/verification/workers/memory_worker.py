"""One rank of the bundled trainer under several recipes, which writes the most that PyTorch had allocated in a step.

Run it with torchrun: memory_worker.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.live_memory import LiveMemory
from fcp_cli.runtime.session import start
from fcp_cli.runtime.stop_request import StopRequest
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.trainer import Trainer
from tests.verification.real_cases import CASES, TOKENS, settings_of, write_case


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in CASES:
        run_dir = folder / name
        if rank == 0:
            run_dir.mkdir()
            write_case(run_dir / "plan.parquet", name, ranks)
        dist.barrier()
        peak = peak_bytes(run_dir, name)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(peak))
    dist.destroy_process_group()


def peak_bytes(run_dir: Path, name: str) -> int:
    """The peak of the second step, whose optimizer has its state already."""
    memory = LiveMemory()
    plan = run_dir / "plan.parquet"
    settings = TrainSettings(
        plan=plan, model="qwen3-tiny", run_dir=run_dir, device="cpu", quiet=True, **settings_of(name)
    )
    with memory.counting(), start(plan, lambda row: [7] * TOKENS) as session:
        trainer = Trainer(settings, session)
        for step in trainer._steps():
            memory.reset_peak()
            trainer._train_step(step, StopRequest())
        trainer.close()
    return memory.peak_bytes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
