"""One rank that trains cases of `tuning_cases` in turn on one process group; their run folders stay.

Run by torchrun as `-m tests.training.workers.tuning_worker FOLDER [CASE...]`.
"""

from __future__ import annotations

import faulthandler
import shutil
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcp_cli.errors import FcpError
from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime.session import start
from fcp_cli.runtime.stop_request import StopRequest
from fcp_cli.training.evaluation import held_out_session
from fcp_cli.training.trainer import Trainer
from tests.patience import PATIENCE_SECONDS
from tests.runtime.workers.leave import leave_job
from tests.training.tuning_cases import (
    CASES,
    EVALUATED,
    EVALUATED_EVERY,
    FULL,
    SAVED_STEPS,
    STEPS,
    Case,
    evaluation_plan_path,
    fetch_of,
)


def train(case: Case, folder: Path, run_dir: Path, **changes: Any) -> None:
    settings = case.settings(folder, run_dir, **changes)
    with start(settings.plan, fetch_of(case), metrics=run_dir / "metrics.jsonl") as session:
        held_out = None
        if settings.eval_every:
            plan = evaluation_plan_path(folder, case)
            held_out = held_out_session(plan, PlanReader(plan).metadata, session, fetch_of(case))
        with closing(Trainer(settings, session, held_out)) as trainer:
            assert trainer.run(StopRequest())


def resume(case: Case, folder: Path, name: str) -> None:
    """Train the second half on the first half's checkpoint."""
    run_dir = folder / "runs" / f"{name}, resumed"
    if dist.get_rank() == 0:
        # Without its owner, which is this process.
        shutil.copytree(folder / "runs" / name, run_dir, ignore=shutil.ignore_patterns("owner.json"))
        shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    dist.barrier()
    train(case, folder, run_dir, resume=True)


def refuse(case: Case, folder: Path, name: str, **changes: Any) -> None:
    try:
        train(case, folder, folder / "runs" / name, **changes)
    except FcpError as error:
        if dist.get_rank() == 0:
            (folder / f"{name}.txt").write_text(str(error))


def main(folder: Path, names: list[str]) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    for name in names:
        train({**CASES, **FULL}[name], folder, folder / "runs" / name, checkpoint_every=SAVED_STEPS)
    for name in EVALUATED if "adapters, 2" in names else ():
        held_out = {"eval_manifest": folder / "unread", "eval_every": EVALUATED_EVERY}
        train(CASES[name], folder, folder / "runs" / f"{name}, evaluated", **held_out)
    if "adapters, 2" in names:
        resume(CASES["adapters, 2"], folder, "adapters, 2")
        refuse(Case(), folder, "no such weight", freeze="visul.*,lm_head*")
        refuse(Case(family="qwen3_vl"), folder, "misspelt weight", freeze="visul.*")
        refuse(Case(), folder, "nothing left", freeze="*")
        refuse(Case(), folder, "no such layer", lora="r=4,target=query+v_proj")
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
