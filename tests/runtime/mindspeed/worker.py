"""One rank of a job that runs plans through MindSpeed; leaves `CASE-RANK.pickle` and `CASE-RANK.txt` in FOLDER.

Run by torchrun as `-m tests.runtime.mindspeed.worker FOLDER`, with a `mindspeed` on PYTHONPATH: this test's own, or a
checkout (then with megatron-core 0.12.1 there, too).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import tests.runtime.megatron.tiny as tiny  # isort: skip  first: it lets megatron run on the CPU

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import package_info, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from fcp_cli.errors import FcpError
from fcp_cli.runtime.integrations.megatron.schedule import hook_schedules
from fcp_cli.runtime.integrations.mindspeed import attention
from tests.patience import PATIENCE_SECONDS
from tests.runtime.fake_npu import FakeNpu
from tests.runtime.megatron.gradient_worker import FULL, global_batches, gradient_alone, lengths_of, two_forwards

SWITCHING, WAVES = "switching.parquet", "waves.parquet"
STATIC_DEGREE = 2
# As a MindSpeed job has them on its command line, and in its transformer configuration.
SETTINGS: Mapping[str, Any] = {
    "context_parallel_size": STATIC_DEGREE,
    "context_parallel_algo": "megatron_cp_algo",
    "attention_mask_type": "causal",
    "cp_window_size": 1,
    "use_cp_send_recv_overlap": False,
    "use_fused_ring_attention_update": False,
    "megatron_cp_in_bnsd": False,
    "context_parallel_kv_cache_policy": None,
    "context_parallel_cache_interval": 0,
    "alibi_fusion_attn_type": None,
    "tp_2d": False,
    "tp_y": 1,
    "reset_attention_mask": False,
    "use_flash_attn": True,
    "sparse_mode": 2,
    "micro_batch_size": 1,
    "seq_length": 128,
    "pre_tockens": 65536,
    "next_tockens": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to run a plan.

    Attributes:
        plan: file name.
        settings: of the transformer.
        mindspeed: other settings of MindSpeed.
        two_forwards: run one forward ahead of the backwards.
        broken: what MindSpeed is left without.
    """

    plan: str = SWITCHING
    settings: Mapping[str, Any] = field(default_factory=dict)
    mindspeed: Mapping[str, Any] = field(default_factory=dict)
    two_forwards: bool = False
    broken: str = ""


CASES: Mapping[str, Case] = {
    "switching": Case(),
    "recomputed": Case(settings=FULL),
    "core attention recomputed": Case(settings={"recompute_granularity": "selective"}),
    "two forwards": Case(plan=WAVES, two_forwards=True),
    "two forwards recomputed": Case(plan=WAVES, two_forwards=True, settings=FULL),
    "without patch manager": Case(broken="patch manager"),
    "keys and values kept": Case(mindspeed={"context_parallel_kv_cache_policy": "full"}),
}
# What must stop with one line.
REFUSED: Mapping[str, Case] = {
    "static degree 1": Case(mindspeed={"context_parallel_size": 1}),
    "ulysses": Case(mindspeed={"context_parallel_algo": "ulysses_cp_algo"}),
    "window": Case(mindspeed={"cp_window_size": 2}),
    "overlap": Case(mindspeed={"use_cp_send_recv_overlap": True}),
    "documents": Case(mindspeed={"reset_attention_mask": True}),
    "general mask": Case(mindspeed={"attention_mask_type": "general"}),
    "per-token loss": Case(settings={"calculate_per_token_loss": False}),
    "other line": Case(broken="other line"),
    "changed": Case(broken="changed"),
    "repatched": Case(broken="repatched"),
}


def become_mindspeed() -> argparse.Namespace:
    """Import MindSpeed and let it put its context parallelism into Megatron, as its adaptor does."""
    torch_npu = MagicMock()
    npu = FakeNpu(head_major=True, stats_dtype=torch.float64)
    torch_npu.npu_fusion_attention = npu.npu_fusion_attention
    torch_npu.npu_fusion_attention_grad = npu.npu_fusion_attention_grad
    sys.modules["torch_npu"] = torch_npu
    setattr(torch, "npu", MagicMock())  # noqa: B010  for type annotations of some versions
    for native in ("torchair", "mindspeed.op_builder"):  # build kernels, of which none is asked for here
        sys.modules[native] = MagicMock()
    try:
        import megatron.core.extensions.transformer_engine  # noqa: F401
    except ImportError:  # megatron-core 0.12: the engine is not there, but is patched
        engine: Any = types.ModuleType("megatron.core.extensions.transformer_engine")
        engine.TEDotProductAttention = type("TEDotProductAttention", (), {})
        sys.modules[engine.__name__] = engine
    from mindspeed import args_utils

    settings = argparse.Namespace(**SETTINGS)
    args_utils._MINDSPEED_ARGS = settings
    from mindspeed.features_manager.context_parallel.context_parallel_feature import (
        ContextParallelFeature,
    )
    from mindspeed.patch_utils import MindSpeedPatchesManager

    ContextParallelFeature().register_patches(MindSpeedPatchesManager, settings)
    MindSpeedPatchesManager.apply_patches()
    return settings


def gradients_planned(plan: Path, case: Case, settings: argparse.Namespace) -> tuple[np.ndarray, list[Any]]:
    """[steps, parameters] of this rank, and what each step reported."""
    for name, value in {**SETTINGS, **case.mindspeed}.items():
        setattr(settings, name, value)
    dataset = tiny.Sequences(lengths_of(plan))
    config = tiny.config(**case.settings, context_parallel_size=STATIC_DEGREE)
    for name, value in vars(settings).items():
        setattr(config, name, value)
    config.context_parallel_size = STATIC_DEGREE
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), tiny.build(config)
    )
    config.context_parallel_size = settings.context_parallel_size
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    batches = list(global_batches(plan))
    arguments = {
        "forward_step_func": partial(forward_step, settings=settings),
        "data_iterator": tiny.data_iterator(dataset),
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
    gradients, reports = [], []
    try:
        with broken(case.broken):
            hook_schedules(schedules)
        run = schedules.get_forward_backward_func()
        for _ in batches:
            model.zero_grad_buffer()
            with broken(case.broken):
                reports.append(run(**arguments))
            assert parallel_state.get_context_parallel_world_size() == STATIC_DEGREE, "the static group is as it was"
            assert settings.context_parallel_size == STATIC_DEGREE
            gradients.append(torch.cat([weight.main_grad.flatten() for weight in model.parameters()]).numpy().copy())
    finally:
        schedules.get_forward_backward_func = get_schedule
    return np.stack(gradients), reports


@contextmanager
def broken(what: str) -> Iterator[None]:
    """Another version of Megatron; a MindSpeed that lacks something, or takes its patches away."""
    if what == "other line":
        package_info.__version__ = "0.16.1"
    held: Any = sys.modules["mindspeed.patch_utils"]
    if what == "patch manager":
        sys.modules["mindspeed.patch_utils"] = types.ModuleType("mindspeed.patch_utils")
    from mindspeed.core.context_parallel import utils

    unflatten = utils.unflatten_softmax
    if what == "changed":
        del utils.unflatten_softmax
    hooks: Any = attention
    placed = hooks.placed
    if what == "repatched":
        hooks.placed = lambda _: nullcontext()
    try:
        yield
    finally:
        package_info.__version__ = "0.12.1"
        sys.modules["mindspeed.patch_utils"] = held
        if what == "changed":
            utils.unflatten_softmax = unflatten
        hooks.placed = placed


def forward_step(data_iterator: Any, model: Any, *, settings: argparse.Namespace) -> tuple[Tensor, Any]:
    """As in pretrain_gpt.py of megatron-core 0.12, whose batch MindSpeed slices."""
    from mindspeed.core.context_parallel.get_batch_utils import (
        get_batch_on_this_cp_rank,
    )

    batch = get_batch_on_this_cp_rank(dict(next(data_iterator)))
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_function, batch["loss_mask"], settings)


def loss_function(loss_mask: Tensor, settings: argparse.Namespace, output: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Likewise: sums over the static group, multiplied by its size; reports are summed over data-parallel ranks."""
    loss = torch.stack([(output.flatten() * loss_mask.flatten()).sum(), loss_mask.sum()])
    if settings.context_parallel_size > 1:
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
    report = loss.clone().detach()
    dist.all_reduce(report, group=parallel_state.get_data_parallel_group())
    tokens = loss[1].clone().detach().to(torch.int)
    return loss[0] * settings.context_parallel_size, tokens, {"lm loss": (report[0], report[1])}


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    rank = dist.get_rank()
    package_info.__version__ = "0.12.1"
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    if rank == 0:
        for plan in (SWITCHING, WAVES):
            dataset, model = tiny.Sequences(lengths_of(folder / plan)), tiny.build(tiny.config())
            alone = np.stack([gradient_alone(model, dataset, rows) for rows in global_batches(folder / plan)])
            (folder / f"{plan}.pickle").write_bytes(pickle.dumps(alone))
    parallel_state.destroy_model_parallel()
    settings = become_mindspeed()
    parallel_state.initialize_model_parallel(context_parallel_size=STATIC_DEGREE, create_gloo_process_groups=False)
    for name, case in REFUSED.items():
        try:
            gradients_planned(folder / case.plan, case, settings)
            message = "no error"
        except FcpError as error:
            message = str(error)
        (folder / f"{name}-{rank}.refused").write_text(message)
        dist.barrier()
    for name, case in CASES.items():
        found = gradients_planned(folder / case.plan, case, settings)
        (folder / f"{name}-{rank}.pickle").write_bytes(pickle.dumps(found))
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes die in the interpreter's teardown


if __name__ == "__main__":
    main(Path(sys.argv[1]))
