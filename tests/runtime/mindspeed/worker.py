"""One rank of a job that runs plans through MindSpeed; leaves `CASE-RANK.pickle` and `CASE-RANK.txt` in FOLDER.

Run by torchrun as `-m tests.runtime.mindspeed.worker FOLDER default|full|all`, with a `mindspeed` on PYTHONPATH: this test's own, or a
checkout (then with its line of megatron-core there, too).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import tests.runtime.mindspeed.cpu  # isort: skip  # noqa: F401
import tests.runtime.megatron.tiny as tiny  # isort: skip

import mindspeed
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from fcp_cli.integrations.megatron.checks import megatron_version
from fcp_cli.integrations.megatron.data import current_microbatch
from fcp_cli.integrations.megatron_schedule import hook_schedules
from fcp_cli.integrations.mindspeed import checks, stack
from tests.patience import PATIENCE_SECONDS
from tests.runtime.megatron.gradient_worker import (
    FULL,
    global_batches,
    gradient,
    gradient_alone,
    lengths_of,
    message_of,
    own_gradients,
    share,
    share_error,
    two_forwards,
)
from tests.runtime.mindspeed.sources import STAND_IN
from tests.runtime.workers import groups
from tests.runtime.workers.groups import own_groups
from tests.runtime.workers.leave import leave_job

Result = TypeVar("Result")
SWITCHING, WAVES, TENSOR = "switching.parquet", "waves.parquet", "tensor.parquet"
SHARING_HEADS, PIPELINE = "sharing_heads.parquet", "pipeline.parquet"
STATIC_DEGREE = 2
RING = f"{checks._RING}.ring_context_parallel"
HAS_RING = checks._has_ring()  # core_r0.18.0 has none


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to run a plan.

    Attributes:
        plan: file name.
        settings: of the transformer.
        mindspeed: other settings of MindSpeed.
        rope: kind of position embedding.
        two_forwards: run one forward ahead of the backwards.
        broken: what MindSpeed is left without.
        tensor_parallel, pipeline_parallel: processes per rank of the plan.
        static: size of the job's context-parallel group; 1: fcp's own ring attends.
        wrapped: whether MindSpeed wraps the core attention to exchange tokens for heads over its own groups.
        own_ring: whether fcp's ring attends in spite of a static group.
        full: left to the full run of tests.
    """

    plan: str = SWITCHING
    settings: Mapping[str, Any] = field(default_factory=dict)
    mindspeed: Mapping[str, Any] = field(default_factory=dict)
    rope: str = "rope"
    two_forwards: bool = False
    broken: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    static: int = STATIC_DEGREE
    wrapped: bool = False
    own_ring: bool = False
    full: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Megatron's process groups."""
        return {
            "context_parallel_size": self.static,
            "tensor_model_parallel_size": self.tensor_parallel,
            "pipeline_model_parallel_size": self.pipeline_parallel,
        }


ULYSSES: Mapping[str, Any] = {"context_parallel_algo": "ulysses_cp_algo"}
HYBRID: Mapping[str, Any] = {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}
CASES: Mapping[str, Case] = {
    "switching": Case(),
    "recomputed": Case(full=True, settings=FULL),
    "core attention recomputed": Case(settings={"recompute_granularity": "selective"}),
    "two forwards": Case(full=True, plan=WAVES, two_forwards=True),
    "two forwards recomputed": Case(plan=WAVES, two_forwards=True, settings=FULL),
    "without patch manager": Case(broken="patch manager"),
    "keys and values kept": Case(mindspeed={"context_parallel_kv_cache_policy": "full"}),
    "mrope": Case(full=True, rope="mrope", settings={"mrope_section": [2, 1, 1]}),
    "mrope recomputed": Case(rope="mrope", settings={"mrope_section": [2, 1, 1], **FULL}),
    "sharing heads": Case(full=True, plan=SHARING_HEADS),
    "sharing heads recomputed": Case(plan=SHARING_HEADS, settings=FULL),
    "ulysses": Case(full=True, plan=SHARING_HEADS, mindspeed=ULYSSES, wrapped=True),
    "ulysses on rings": Case(full=True, mindspeed=ULYSSES, wrapped=True),
    "hybrid": Case(full=True, plan=SHARING_HEADS, mindspeed=HYBRID, static=4, wrapped=True),
    "hybrid mrope": Case(
        plan=SHARING_HEADS,
        mindspeed=HYBRID,
        static=4,
        wrapped=True,
        rope="mrope",
        settings={"mrope_section": [2, 1, 1]},
    ),
    "own ring": Case(full=True, static=1),
    "own ring recomputed": Case(static=1, settings=FULL),
    "own ring, core attention recomputed": Case(full=True, static=1, settings={"recompute_granularity": "selective"}),
    "own ring sharing heads": Case(static=1, plan=SHARING_HEADS),
    "own ring mrope": Case(full=True, static=1, rope="mrope", settings={"mrope_section": [2, 1, 1]}),
    "double ring": Case(
        mindspeed={"cp_window_size": 2, "use_cp_send_recv_overlap": True}, static=4, settings=FULL, own_ring=True
    ),
    "keys gathered": Case(full=True, mindspeed={"context_parallel_algo": "kvallgather_cp_algo"}, own_ring=True),
    "adaptive": Case(
        full=True, plan=SHARING_HEADS, mindspeed={"context_parallel_algo": "adaptive_cp_algo"}, own_ring=True
    ),
    "no ring": Case(full=True, plan=SHARING_HEADS, broken="no ring", own_ring=True),
}
STAGES: Mapping[str, Any] = {"pipeline_model_parallel_size": 2}
SHARED: Mapping[str, Any] = {"tensor_model_parallel_size": 2}
# On two ranks of the plan, with two processes each.
PARALLEL_CASES: Mapping[str, Case] = {
    "tensor": Case(full=True, plan=TENSOR, tensor_parallel=2, settings=SHARED),
    "sequence recomputed": Case(plan=TENSOR, tensor_parallel=2, settings={**SHARED, "sequence_parallel": True, **FULL}),
    "pipeline": Case(full=True, plan=PIPELINE, pipeline_parallel=2, settings=STAGES),
    "pipeline recomputed": Case(plan=PIPELINE, pipeline_parallel=2, settings={**STAGES, **FULL}),
    "own ring pipeline": Case(full=True, plan=PIPELINE, pipeline_parallel=2, settings=STAGES, static=1),
}
# What must stop with one line.
REFUSED: Mapping[str, Case] = {
    "per-token loss": Case(settings={"calculate_per_token_loss": False}),
    "changed": Case(broken="changed"),
    "other attention": Case(broken="other attention"),
    "repatched": Case(broken="repatched"),
    "probe": Case(broken="rotary"),
}


def become_mindspeed() -> argparse.Namespace:
    """Import MindSpeed, which puts itself into Megatron by the command line."""
    flags = os.environ.get("FCP_MINDSPEED_FLAGS", "").split()
    sys.argv = [sys.argv[0], "--context-parallel-size", str(STATIC_DEGREE), "--transformer-impl", "local", *flags]
    from tests.runtime.mindspeed.train import job_settings

    return job_settings(STATIC_DEGREE)


def gradients_alone(folder: Path) -> Mapping[tuple[str, str], np.ndarray]:
    """[steps, parameters] of one process, by plan and position embedding, with Megatron's own attention."""
    found = {}
    for case in CASES.values():
        if (case.plan, case.rope) not in found:
            plan = folder / case.plan
            section = case.settings.get("mrope_section")
            model = tiny.build(tiny.config(mrope_section=section), rope=case.rope)
            alone = [gradient_alone(model, dataset_of(plan, case), rows) for rows in global_batches(plan)]
            found[case.plan, case.rope] = np.stack(alone)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A model of one process, and its gradients after each step, by the names of its parameters."""

    weights: Mapping[str, Tensor]
    gradients: Sequence[Mapping[str, Tensor]]


def whole_models(folder: Path) -> Mapping[str, Whole]:
    """By plan."""
    return {plan: whole_model(folder / plan) for plan in {case.plan for case in PARALLEL_CASES.values()}}


def whole_model(plan: Path) -> Whole:
    model = tiny.build(tiny.config())
    parameters = dict(model.named_parameters())
    gradients = []
    for rows in global_batches(plan):
        gradient_alone(model, tiny.Sequences(lengths_of(plan)), rows)
        gradients.append({name: gradient(parameter).clone() for name, parameter in parameters.items()})
    return Whole(weights={name: parameter.detach() for name, parameter in parameters.items()}, gradients=gradients)


def worst_share_error(plan: Path, case: Case, settings: argparse.Namespace, whole: Whole) -> float:
    """Largest difference of this process's share of the gradient from one process's, relative to its largest entry."""
    from tests.runtime.mindspeed.train import wrapped_model

    _, model = wrapped_model(settings, core=engine_core(case), **case.settings)
    with torch.no_grad():
        for name, parameter in tiny.whole_names(model.module).items():
            parameter.copy_(share(whole.weights[name], parameter, case.tensor_parallel))
    found, _ = steps_planned(plan, case, settings, model, lambda: own_gradients([model]))
    steps = zip(found, whole.gradients, strict=True)
    return max(share_error(gradients, named, case.tensor_parallel) for gradients, named in steps)


def dataset_of(plan: Path, case: Case) -> tiny.Sequences:
    return tiny.Sequences(lengths_of(plan), axes=3 if case.rope == "mrope" else 1)


def gradients_planned(plan: Path, case: Case, settings: argparse.Namespace) -> tuple[np.ndarray, list[Any]]:
    """[steps, parameters] of this rank, and what each step reported."""
    from tests.runtime.mindspeed.train import wrapped_model

    engine = engine_core(case)
    _, model = wrapped_model(settings, rope=case.rope, core=engine, **case.settings)
    core = type(model.module.decoder.layers[0].self_attention.core_attention).__name__
    assert (core == "UlyssesContextAttention") == (case.wrapped and engine is None), core
    if case.broken == "other attention":
        model.module.decoder.layers[0].self_attention.core_attention = torch.nn.Identity()
    if case.broken == "rotary":
        model.module.rotary_pos_emb.register_forward_hook(_reverse)
    gradients, reports = steps_planned(plan, case, settings, model, lambda: flat_gradient(model))
    return np.stack(gradients), reports


def engine_core(case: Case) -> Any:
    """Megatron's wrapper of Transformer Engine, which alone attends over static groups from megatron-core 0.17 on."""
    if case.static == 1 or megatron_numbers() < (0, 17):
        return None
    from tests.runtime.megatron.fake_transformer_engine import megatron_wrapper

    core = megatron_wrapper()
    core.__module__ = "megatron.core.extensions.transformer_engine"  # a copy of which it is
    return core


def megatron_numbers() -> tuple[int, ...]:
    return tuple(int(part) for part in megatron_version().split(".")[:2])


def flat_gradient(model: Any) -> np.ndarray:
    found: np.ndarray = torch.cat([weight.main_grad.flatten() for weight in model.parameters()]).numpy().copy()
    return found


def steps_planned(
    plan: Path, case: Case, settings: argparse.Namespace, model: Any, take: Callable[[], Result]
) -> tuple[list[Result], list[Any]]:
    """What `take` finds after each step of the plan, and what the step reported."""
    from tests.runtime.mindspeed.train import forward_step

    batches = list(global_batches(plan))
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": tiny.data_iterator(dataset_of(plan, case)),
        "model": [model],
        "num_microbatches": len(batches[0]) // parallel_state.get_data_parallel_world_size(),
        "micro_batch_size": 1,
        "seq_length": 128,
        "forward_only": False,
    }
    os.environ["FCP_PLAN"] = str(plan)
    get_schedule = schedules.get_forward_backward_func
    if case.two_forwards:
        schedules.get_forward_backward_func = lambda: two_forwards
    found, reports = [], []
    try:
        with broken(case.broken):
            hook_schedules(schedules)
        run = schedules.get_forward_backward_func()
        for _ in batches:
            model.zero_grad_buffer()
            with broken(case.broken):
                reports.append(_numbers(run(**arguments)))
            assert parallel_state.get_context_parallel_world_size() == case.static, "the static group is as it was"
            assert settings.context_parallel_size == case.static
            found.append(take())
    finally:
        schedules.get_forward_backward_func = get_schedule
    return found, reports


def _numbers(reports: Any) -> Any:
    """What a step reported, without tensors, which newer Megatrons pickle in a way of their own."""
    return [{name: tuple(map(float, pair)) for name, pair in report.items()} for report in reports or ()]


def _reverse(_: Any, __: Any, table: Tensor) -> Tensor | None:
    """Of the rotary table under a plan, the rows from the last to the first."""
    return None if current_microbatch.get() is None else table.flip(0)


@contextmanager
def broken(what: str) -> Iterator[None]:
    """A MindSpeed that lacks something, or takes its patches away."""
    held = {name: sys.modules.get(name) for name in (RING, "mindspeed.patch_utils")}
    if what == "no ring":
        sys.modules[RING] = None  # type: ignore[assignment]  # so that importing it fails
    if what == "patch manager":
        sys.modules["mindspeed.patch_utils"] = types.ModuleType("mindspeed.patch_utils")
    from mindspeed.core.context_parallel import utils

    unflatten = getattr(utils, "unflatten_softmax", None)
    if what == "changed":
        del utils.unflatten_softmax
    hooks: Any = stack
    placed = hooks.placed
    if what == "repatched":
        hooks.placed = lambda _: nullcontext()
    try:
        yield
    finally:
        sys.modules.update((name, module) for name, module in held.items() if module is not None)
        if what == "changed":
            utils.unflatten_softmax = unflatten
        hooks.placed = placed


@contextmanager
def parallel(**sizes: int) -> Iterator[None]:
    """Within it, Megatron has process groups of these sizes. Collective."""
    with own_groups():
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # which Megatron 0.12 does not forget
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        yield
        parallel_state.destroy_model_parallel()


def chosen(cases: Mapping[str, Case], kind: str) -> list[tuple[str, Case]]:
    return [(name, case) for name, case in cases.items() if kind == "all" or case.full == (kind == "full")]


@contextmanager
def arranged(case: Case, settings: argparse.Namespace) -> Iterator[None]:
    """Within it, the job is as the case wants it. Collective."""
    changes = {**case.mindspeed, "context_parallel_size": case.static}
    with mock.patch.dict(vars(settings), changes), parallel(**case.sizes), ExitStack() as patches:
        if case.own_ring and HAS_RING:
            patches.enter_context(mock.patch(f"{RING}.ringattn_context_parallel", side_effect=AssertionError))
        yield


def main(folder: Path, kind: str = "all") -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    if not Path(str(mindspeed.__file__)).is_relative_to(STAND_IN):
        groups.MOST_THREADS = 4000  # rotary tables that newer Megatrons keep hold the groups of models that are gone
    torch.compiler.set_stance("force_eager")  # Megatron compiles what it fuses, for longer than all cases take
    rank = dist.get_rank()
    with parallel():
        alone = gradients_alone(folder) if rank == 0 else {}
        whole = whole_models(folder)
    settings = become_mindspeed()
    for name, case in chosen(REFUSED if HAS_RING else {}, kind):
        with arranged(case, settings):
            message = message_of(partial(gradients_planned, folder / case.plan, case, settings))
        (folder / f"{name}-{rank}.refused").write_text(message)
    for name, case in chosen(CASES, kind):
        with arranged(case, settings):
            found = gradients_planned(folder / case.plan, case, settings)
        (folder / f"{name}-{rank}.pickle").write_bytes(pickle.dumps(found))
        if rank == 0:
            (folder / f"{name}-alone.pickle").write_bytes(pickle.dumps(alone[case.plan, case.rope]))
    for name, case in chosen(PARALLEL_CASES, kind):
        with arranged(case, settings):
            worst = worst_share_error(folder / case.plan, case, settings, whole[case.plan])
        (folder / f"{name}-{rank}.pickle").write_bytes(pickle.dumps(worst))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
