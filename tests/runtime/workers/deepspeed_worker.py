"""DeepSpeed engines in turn, on the ranks of a plan or in one process: `-m tests.runtime.workers.deepspeed_worker FOLDER`.

Each case leaves `CASE-RANK.pickle` in the folder, or `CASE, alone-0.pickle` where this is the only process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from fcp_cli.cost.recipe import Reduce
from fcp_cli.plan.metadata import Sync
from fcp_cli.runtime.session import start
from tests.runtime.loops.cases import (
    LEARNING_RATE,
    SYNCS,
    Trained,
    flat,
    global_batches,
    model_alone,
    model_under_a_plan,
    tokens_of,
)
from tests.runtime.workers.leave import join_job, leave_cases, leave_job


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One engine and the loop around it."""

    stage: int
    sync: Sync
    reduce: Reduce = "wave"
    accumulation: int = 1
    clipping: float = 0.0
    steps_inside: bool = False
    offloads: bool = False
    saves: bool = False


CASES: Mapping[str, Case] = {
    **{f"zero {stage} {sync}": Case(stage=stage, sync=sync) for stage in (0, 1, 2) for sync in SYNCS},
    "zero 2 once a step": Case(stage=2, sync="microbatch", reduce="step"),
    "zero 3 microbatch": Case(stage=3, sync="microbatch"),
    "zero 3 once a step": Case(stage=3, sync="microbatch", reduce="step"),
    "zero 1 step inside": Case(stage=1, sync="iteration", steps_inside=True),
    "zero 2 step inside": Case(stage=2, sync="microbatch", steps_inside=True),
    "zero 2 accumulation": Case(stage=2, sync="iteration", accumulation=4),
    "zero 2 clipping": Case(stage=2, sync="iteration", clipping=0.05),
    "zero 2 offload": Case(stage=2, sync="iteration", offloads=True),
}


RESUMED = {"resumed zero 2": 2, "resumed zero 3": 3}
"""Name -> stage of runs that go on after one of three steps, as the runs in waves of that stage would have."""


def engine_of(case: Case, model: torch.nn.Module) -> Any:
    zero: dict[str, Any] = {"stage": case.stage, "reduce_bucket_size": 4096}  # several buckets
    if case.offloads:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


@contextlib.contextmanager
def whole_weights(engine: Any) -> Iterator[None]:
    if engine.zero_optimization_stage() == 3:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            yield
    else:
        yield


def norm_of(engine: Any) -> float:
    """Return the norm that the engine found, before clipping; stage 0 computes none without clipping."""
    norm = engine.get_global_grad_norm()
    return float("nan") if norm is None else float(norm)


def follow(folder: Path, case: Case, resume: Path | None = None) -> Trained:
    plan = folder / f"{case.sync}.parquet"
    losses, norms = [], []
    with start(plan, tokens_of(plan)) as session:
        engine = engine_of(case, model_under_a_plan())
        if resume is not None:
            _, state = engine.load_checkpoint(str(resume), tag="1")
            session.load_state_dict(state)
        for step in session.steps(engine, reduce=case.reduce):
            for batch in step:
                engine.backward(batch.loss(engine(batch.input_ids, batch.position_ids, batch.ring)))
                if case.steps_inside:
                    engine.step()
            if not case.steps_inside:
                engine.step()
            if case.saves:
                engine.save_checkpoint(
                    str(folder / "saved"), tag=str(step.index + 1), client_state=session.state_dict()
                )
            losses.append(step.reduced_loss())
            norms.append(norm_of(engine))
    with whole_weights(engine):
        return Trained(losses=losses, norms=norms, weights=flat(engine.module))


def alone(folder: Path, case: Case) -> Trained:
    """Run the same engine on the same global batches, by DeepSpeed's own rules for accumulation."""
    engine = engine_of(case, model_alone())
    losses, norms = [], []
    for batch in global_batches(folder / f"{case.sync}.parquet"):
        total = 0.0
        for sequence in batch:
            engine.set_gradient_accumulation_boundary(sequence.is_last)
            loss = sequence.loss(engine(sequence.input_ids, sequence.position_ids))
            engine.backward(loss, scale_wrt_gas=False)
            total += float(loss.detach())
        engine.step()
        losses.append(total)
        norms.append(norm_of(engine))
    with whole_weights(engine):
        return Trained(losses=losses, norms=norms, weights=flat(engine.module))


def refused(folder: Path) -> Mapping[str, Any]:
    """Name -> what must raise an error of one line."""

    def first_step(sync: Sync, stage: int, part: str = "") -> None:
        plan = folder / f"{sync}.parquet"
        with start(plan, tokens_of(plan)) as session:
            engine = engine_of(Case(stage=stage, sync=sync), model_under_a_plan())
            session.steps(engine.get_submodule(part) if part else engine)

    def no_engine_step() -> None:
        plan = folder / "iteration.parquet"
        with start(plan, tokens_of(plan)) as session:
            engine = engine_of(Case(stage=2, sync="iteration"), model_under_a_plan())
            for step in session.steps(engine):
                for batch in step:
                    engine.backward(batch.loss(engine(batch.input_ids, batch.position_ids, batch.ring)))

    return {
        "no engine.step()": no_engine_step,
        "zero 3 iteration": lambda: first_step("iteration", 3),
        "the module of an engine": lambda: first_step("iteration", 1, "module"),
        "the module of zero 3": lambda: first_step("microbatch", 3, "module"),
    }


def resumed(folder: Path, stage: int) -> Trained:
    case = Case(stage=stage, sync="microbatch", saves=True)
    follow(folder, case)
    return follow(folder, replace(case, saves=False), resume=folder / "saved")


def main(folder: Path) -> None:
    join_job()
    deepspeed.init_distributed("gloo")
    if dist.get_world_size() == 1:
        leave_cases(folder, {f"{name}, alone": partial(alone, folder, case) for name, case in CASES.items()})
    else:
        leave_cases(folder, {name: partial(follow, folder, case) for name, case in CASES.items()})
        leave_cases(folder, {name: partial(resumed, folder, stage) for name, stage in RESUMED.items()})
        leave_cases(folder, refused(folder))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
