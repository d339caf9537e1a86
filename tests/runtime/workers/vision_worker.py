"""One rank of a job that trains a vision-language model in many ways; each leaves `CASE-RANK.pickle` in a folder.

Run by torchrun as `-m tests.runtime.workers.vision_worker FOLDER [full]`. The folder holds the plans.
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

from fcp_cli.runtime.session import start
from fcp_cli.verification.emulation import gradients_on_rank
from tests.patience import PATIENCE_SECONDS
from tests.runtime.vision_models import VisionCase, build, fetch, in_double
from tests.runtime.workers.leave import leave_job

WAVES, ITERATION = "waves.parquet", "iteration.parquet"
APART = "apart.parquet"  # the last rank only encodes
SHARED_WAVES = "shared-waves.parquet"  # all ranks of a wave share the encoder's work

CASES: Mapping[str, tuple[str, VisionCase]] = {
    "plain": (ITERATION, VisionCase()),
    "labels": (ITERATION, VisionCase(labelled=True)),
    "recomputed": (ITERATION, VisionCase(recompute="non-reentrant")),
    "recomputed reentrant": (ITERATION, VisionCase(recompute="reentrant")),
    "frozen recomputed": (ITERATION, VisionCase(frozen=True, recompute="non-reentrant")),
    "ddp": (ITERATION, VisionCase(wrapping="ddp", recompute="selective")),
    "ddp frozen": (ITERATION, VisionCase(wrapping="ddp", frozen=True)),
    "fsdp frozen over the wave": (SHARED_WAVES, VisionCase(wrapping="fsdp", frozen=True)),
    "internvl fsdp over the wave recomputed": (
        SHARED_WAVES,
        VisionCase(family="internvl", wrapping="fsdp", recompute="non-reentrant"),
    ),
    "encoder rank": (APART, VisionCase(recompute="non-reentrant")),
    "encoder rank frozen": (APART, VisionCase(frozen=True)),
    "encoder rank internvl": (APART, VisionCase(family="internvl")),
    "fsdp recomputed": (WAVES, VisionCase(wrapping="fsdp", recompute="non-reentrant")),
    "fsdp frozen": (WAVES, VisionCase(wrapping="fsdp", frozen=True)),
    "qwen2_5_vl": (ITERATION, VisionCase(family="qwen2_5_vl", labelled=True)),
    "qwen2_5_vl fsdp recomputed": (WAVES, VisionCase(family="qwen2_5_vl", wrapping="fsdp", recompute="non-reentrant")),
    "internvl ddp frozen": (ITERATION, VisionCase(family="internvl", wrapping="ddp", frozen=True)),
    "internvl fsdp recomputed": (WAVES, VisionCase(family="internvl", wrapping="fsdp", recompute="non-reentrant")),
}
# What the others cover by example, or test_rendezvous.py with one hardware queue.
MORE_CASES = frozenset(
    {
        *("ddp", "fsdp recomputed", "recomputed"),
        *("qwen2_5_vl fsdp recomputed", "internvl ddp frozen", "internvl fsdp recomputed"),
    }
)


def main(folder: Path, *, full: bool) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    for name in (name for name in CASES if (name in MORE_CASES) == full):
        plan, case = CASES[name]
        with start(folder / f"{case.family}-{plan}", fetch(case)) as session, in_double(case):
            found = gradients_on_rank(session, *build(case))
        (folder / f"{name}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(found))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), full="full" in sys.argv[2:])
