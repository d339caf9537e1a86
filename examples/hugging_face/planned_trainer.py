"""The same as train.py, but the class of its trainer says that it follows a plan: no hook is needed.

FCP_PLAN=plan.parquet torchrun --nproc-per-node 2 planned_trainer.py
"""

from __future__ import annotations

from train import trainer_of
from transformers import Trainer

from fcp_cli import runtime as fcp


class PlannedTrainer(fcp.FollowsPlan, Trainer):
    """A trainer that runs the steps of the plan in FCP_PLAN; `plan = "plan.parquet"` here would name it instead."""


if __name__ == "__main__":
    trainer_of(PlannedTrainer, "out").train()
