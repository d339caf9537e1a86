"""One rank of a job that trains a Gemma 3 with images and windows in several ways; each leaves `CASE-RANK.pickle`.

Run by torchrun as `-m tests.runtime.workers.gemma3_worker FOLDER`. The folder holds the plans, which keep the masks.
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

from fcp_cli.integrations.transformers import prepare
from fcp_cli.runtime.session.start import start
from fcp_cli.verification.replay import gradients_on_rank
from tests.patience import PATIENCE_SECONDS
from tests.runtime.gemma3_models import gemma3, norms_in_fp64, tokens_of
from tests.runtime.models import Recomputation, Wrapping, recompute, wrap
from tests.runtime.workers.leave import leave_job

WAVES, ITERATION = "waves.parquet", "iteration.parquet"
CASES: Mapping[str, tuple[str, Wrapping, Recomputation]] = {
    "ddp": (ITERATION, "ddp", "non-reentrant"),
    "fsdp": (WAVES, "fsdp", "selective"),
}


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    for name, (plan, wrapping, recomputed) in CASES.items():
        model = gemma3()
        prepare(model)
        recompute(model, recomputed)
        wrapped = wrap(model, wrapping, list(model.model.layers))
        with start(folder / plan, tokens_of) as session, norms_in_fp64():
            found = gradients_on_rank(
                session,
                wrapped,
                lambda mb, run=wrapped: mb.loss(run(input_ids=mb.input_ids, position_ids=mb.position_ids).logits),  # type: ignore[misc]
            )
        (folder / f"{name}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(found))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
