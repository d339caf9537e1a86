"""One rank of a job that trains a model with linear attention in several ways; each leaves `CASE-RANK.pickle`.

Run by torchrun as `-m tests.runtime.workers.linear_worker FOLDER`. The folder holds the plans.
"""

from __future__ import annotations

import faulthandler
import pickle
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fcp_cli.runtime.session.start import start
from fcp_cli.verification.replay import gradients_on_rank, synthetic_tokens
from tests.patience import PATIENCE_SECONDS
from tests.runtime.linear_models import InDouble, loss_under_a_plan, model_under_a_plan
from tests.runtime.models import Recomputation, Wrapping, wrap
from tests.runtime.workers.leave import leave_job

WAVES, ITERATION = "waves.parquet", "iteration.parquet"
CASES: Mapping[str, tuple[str, str, Wrapping, Recomputation]] = {
    "plain": ("qwen3_next", ITERATION, "none", "off"),
    "ddp": ("qwen3_next", ITERATION, "ddp", "selective"),
    "fsdp": ("qwen3_next", WAVES, "fsdp", "non-reentrant"),
    "plain-mamba": ("bamba", ITERATION, "none", "off"),
    "ddp-mamba": ("nemotron_h", ITERATION, "ddp", "non-reentrant"),
    "fsdp-mamba": ("bamba", WAVES, "fsdp", "selective"),
}


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    for name, (kind, plan, wrapping, recompute) in CASES.items():
        model = model_under_a_plan(recompute, kind)
        wrapped = wrap(model, wrapping, list(model.model.layers))
        with start(folder / plan, synthetic_tokens(folder / plan, 61)) as session, InDouble():
            found = gradients_on_rank(session, wrapped, loss_under_a_plan(wrapped))
        (folder / f"{name}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(found))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
