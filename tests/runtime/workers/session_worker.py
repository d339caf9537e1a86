"""One rank of a job that runs many cases in turn on one process group; each leaves `CASE-RANK.pickle` in a folder.

Run by torchrun as `-m tests.runtime.workers.session_worker FOLDER [full]`. The folder holds the plans.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fcp_cli.runtime import loss, recompute
from fcp_cli.runtime.session import start
from fcp_cli.verification.emulation import Replayed, gradients_on_rank
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, plain_attend, ring_attend
from tests.runtime.models import VOCAB_SIZE, Case, build, wrap
from tests.runtime.plans import Row, random_steps, write_plan
from tests.runtime.workers.leave import join_job, leave_cases, leave_job

REFUSED_WRAPPINGS = (
    "ddp beside a parameter",
    "composable ddp",
    "data parallel",
    "tensor parallel",
    "fsdp divided twice",
    "fsdp1 of a part",
)
WAVES, ITERATION = "waves.parquet", "iteration.parquet"

GRADIENT_CASES: Mapping[str, tuple[str, Case]] = {
    "plain": (ITERATION, Case()),
    "plain fp32": (ITERATION, Case(dtype=torch.float32)),
    "labels": (ITERATION, Case(labelled=True)),
    "ddp": (ITERATION, Case(wrapping="ddp")),
    "ddp fp32": (ITERATION, Case(wrapping="ddp", dtype=torch.float32)),
    "ddp labels": (ITERATION, Case(wrapping="ddp", labelled=True)),
    "ddp views": (ITERATION, Case(wrapping="ddp views")),
    "ddp in a shell": (ITERATION, Case(wrapping="ddp in a shell")),
    "fsdp undivided": (WAVES, Case(wrapping="fsdp undivided")),
    "fsdp kept undivided": (ITERATION, Case(wrapping="fsdp kept undivided")),
    "replicate": (ITERATION, Case(wrapping="replicate")),
    "ddp waves": (WAVES, Case(wrapping="ddp", recompute="non-reentrant")),
    "fsdp": (WAVES, Case(wrapping="fsdp")),
    "fsdp kept": (ITERATION, Case(wrapping="fsdp kept")),
    "fsdp kept fp32": (ITERATION, Case(wrapping="fsdp kept", dtype=torch.float32)),
    "fsdp kept recomputed": (ITERATION, Case(wrapping="fsdp kept", recompute="non-reentrant")),
    "fsdp kept labels": (ITERATION, Case(wrapping="fsdp kept", labelled=True)),
    "hsdp kept": (ITERATION, Case(wrapping="hsdp kept")),
    "fsdp kept waves": (WAVES, Case(wrapping="fsdp kept")),
    "hsdp": (WAVES, Case(wrapping="hsdp")),
    "fsdp fp32": (WAVES, Case(wrapping="fsdp", dtype=torch.float32)),
    "fsdp step": (WAVES, Case(wrapping="fsdp", reduce="step")),
    "hsdp step": (WAVES, Case(wrapping="hsdp", reduce="step")),
    "hsdp kept waves": (WAVES, Case(wrapping="hsdp kept")),
    "fsdp recomputed": (WAVES, Case(wrapping="fsdp", recompute="non-reentrant")),
    "qwen3 ddp": (ITERATION, Case(family="qwen3", wrapping="ddp", recompute="reentrant")),
    "qwen3 fsdp kept": (ITERATION, Case(family="qwen3", wrapping="fsdp kept", recompute="non-reentrant")),
    "qwen3 fsdp": (WAVES, Case(family="qwen3", wrapping="fsdp", recompute="non-reentrant")),
    "loss of hidden states": (ITERATION, Case(labelled=True, loss="chunked", recompute="selective")),
    "qwen3 chunked": (ITERATION, Case(family="qwen3", loss="chunked", labelled=True)),
    "qwen3 ddp chunked": (ITERATION, Case(family="qwen3", wrapping="ddp", loss="chunked", recompute="activation")),
    "qwen3 fsdp kept chunked": (
        ITERATION,
        Case(family="qwen3", wrapping="fsdp kept", loss="chunked", recompute="selective", tied=True),
    ),
    "qwen3 fsdp chunked": (
        WAVES,
        Case(
            family="qwen3",
            wrapping="fsdp",
            loss="chunked",
            recompute="elementwise",
            labelled=True,
            tied=True,
            offloads=True,
        ),
    ),
    "qwen3 fsdp as needed": (WAVES, Case(family="qwen3", wrapping="fsdp", recompute="as-needed", labelled=True)),
    "llama hsdp chunked fp32": (
        WAVES,
        Case(family="llama", wrapping="hsdp", loss="chunked", recompute="non-reentrant", dtype=torch.float32),
    ),
    "llama fsdp fp32": (WAVES, Case(family="llama", wrapping="fsdp", dtype=torch.float32)),
}
# What the others cover by example, or test_rendezvous.py with one hardware queue.
MORE_CASES = frozenset(
    {
        *("ddp waves", "fsdp recomputed", "hsdp"),
        *("plain fp32", "labels", "ddp", "ddp fp32", "fsdp", "fsdp fp32", "hsdp step", "hsdp kept waves"),
        *("fsdp kept", "fsdp kept fp32", "fsdp kept labels", "fsdp kept waves"),
        *("qwen3 fsdp kept", "qwen3 fsdp", "qwen3 chunked", "qwen3 ddp chunked", "llama fsdp fp32"),
    }
)


NUM_RANKS = 4
# Groups of any ranks that change with every micro-batch, unequal numbers of micro-batches, lone tokens, an idle rank.
HAND_MADE: Sequence[Sequence[Row]] = (
    (Row([0, 1, 3], [7, 1, 30]), Row([2], [5]), Row([1, 2], [13]), Row([0, 1, 2, 3], [41, 2]), Row([1], [3, 3])),
    (Row([0, 2], [1]), Row([1, 2], [9, 17]), Row([0, 1, 2], [1, 1]), Row([3])),
)


def write_inputs(folder: Path) -> None:
    write_plan(folder / ITERATION, HAND_MADE, num_ranks=NUM_RANKS)
    waves = random_steps(NUM_RANKS, 3, sync="microbatch", seed=11)
    write_plan(folder / WAVES, waves, num_ranks=NUM_RANKS, sync="microbatch")
    write_plan(folder / "eight.parquet", [[Row(range(8), [50])]], num_ranks=8)
    write_plan(folder / "degree-2.parquet", [[Row([0, 1], [9]), Row([2, 3], [9])]] * 2, num_ranks=NUM_RANKS)
    write_plan(folder / "two-each.parquet", [[Row([r], [4]) for r in range(4)] * 2] * 2, num_ranks=NUM_RANKS)
    for rank in range(NUM_RANKS):
        write_copies(folder / f"copy-{rank}", folder / ITERATION, rank)


def write_copies(copies: Path, plan: Path, rank: int) -> None:
    """What rank 2 sees differs: another valid plan, an edited one, none."""
    copies.mkdir()
    for name in ("other", "edited", "missing"):
        shutil.copy(plan, copies / f"{name}.parquet")
    if rank == 2:
        write_plan(copies / "other.parquet", HAND_MADE[:1], num_ranks=NUM_RANKS)
        table = pq.read_table(plan)
        seconds = pa.array([1.0 + value for value in table["seconds"].to_pylist()])
        column = table.schema.get_field_index("seconds")
        pq.write_table(table.set_column(column, table.schema.field(column), seconds), copies / "edited.parquet")
        (copies / "missing.parquet").unlink()


def gradients(plan: Path, case: Case) -> Replayed:
    with start(plan, case.fetch(plan)) as session:
        return gradients_on_rank(session, *build(case), reduce=case.reduce)


def gradient_case(folder: Path, name: str) -> Replayed:
    plan, case = GRADIENT_CASES[name]
    return gradients(folder / plan, case)


def first_step(
    plan: Path,
    *,
    attend: Any = ring_attend,
    wrapping: Any = "none",
    stop_early: bool = False,
    gives_model: bool = True,
) -> None:
    """Run one step, and what follows it, as a wrong script would."""
    with start(plan, lambda row: torch.arange(400) % VOCAB_SIZE) as session:
        model = TinyLanguageModel(TinyConfig(), attend)
        wrapped = wrap(model, wrapping, list(model.blocks.children()))
        for step in session.steps(wrapped if gives_model else None):
            for microbatch in step:
                logits = wrapped(microbatch.input_ids, microbatch.position_ids, microbatch.ring)
                torch.autograd.backward(microbatch.loss(logits))
                if stop_early:
                    break


def error_cases(folder: Path, rank: int) -> Mapping[str, Callable[[], Any]]:
    """Name -> what must raise an error of one line on every rank."""
    iteration, copies = folder / ITERATION, folder / f"copy-{rank}"
    return {
        "eight ranks": lambda: start(folder / "eight.parquet"),
        "other plan": lambda: start(copies / "other.parquet"),
        "edited": lambda: start(copies / "edited.parquet"),
        "missing": lambda: start(copies / "missing.parquet"),
        "own attention": lambda: first_step(folder / "degree-2.parquet", attend=plain_attend),
        "left early": lambda: first_step(folder / "two-each.parquet", stop_early=True),
        "ddp with a hook": lambda: first_step(iteration, wrapping="ddp hook"),
        "ddp with a static graph": lambda: first_step(iteration, wrapping="ddp static"),
        "ddp that steps is not given": lambda: first_step(iteration, wrapping="ddp", gives_model=False),
        "ddp that ignores a parameter": lambda: first_step(iteration, wrapping="ddp ignoring"),
        **{name: partial(first_step, folder / WAVES, wrapping=name) for name in REFUSED_WRAPPINGS},
        "fsdp under iteration": lambda: first_step(iteration, wrapping="fsdp"),
        "fsdp over half": lambda: first_step(folder / WAVES, wrapping="fsdp over half"),
        "hsdp without names": lambda: first_step(folder / WAVES, wrapping="hsdp without names"),
        "fsdp of a part": lambda: first_step(folder / WAVES, wrapping="fsdp of a part"),
    }


def main(folder: Path, *, full: bool) -> None:
    rank = join_job()
    loss.LOGITS_BYTES = 600  # several blocks of a small vocabulary
    recompute.LEAST_BYTES = 1
    names = [name for name in GRADIENT_CASES if (name in MORE_CASES) == full]
    leave_cases(folder, {name: partial(gradient_case, folder, name) for name in names})
    if not full:
        leave_cases(folder, error_cases(folder, rank), AssertionError)  # torch refuses HSDP without names itself
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), full="full" in sys.argv[2:])
