"""A MindSpeed script that knows nothing of fcp: `train.py LENGTHS RESULTS --steps N --context-parallel-size C`.

Like `pretrain_gpt.py` of megatron-core 0.12 it slices batches for its static group, sums losses over that and
multiplies them by its size; it has that of MindSpeed's, and no `megatron.training`, which is not on PyPI.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import tests.runtime.mindspeed.cpu  # isort: skip  # noqa: F401
import mindspeed.megatron_adaptor  # isort: skip  # noqa: F401  first, as MindSpeed asks
import tests.runtime.megatron.tiny as tiny  # isort: skip

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from mindspeed.args_utils import get_full_args
from torch import Tensor

try:
    from mindspeed.core.context_parallel.get_batch_utils import get_batch_on_this_cp_rank
except ImportError:  # which core_r0.18.0 leaves to Megatron
    from megatron.core import utils

    get_batch_on_this_cp_rank = partial(utils.get_batch_on_this_cp_rank, is_hybrid_cp=False)

GLOBAL_BATCH_SIZE = 8
# What Megatron's own command line has besides MindSpeed's, which copies both into the transformer's configuration.
_MEGATRON: dict[str, Any] = {
    "use_flash_attn": True,
    "reset_attention_mask": False,
    "micro_batch_size": 1,
    "seq_length": 128,
}


def job_settings(context_parallel_size: int) -> argparse.Namespace:
    settings: argparse.Namespace = get_full_args()
    vars(settings).update(_MEGATRON, context_parallel_size=context_parallel_size)
    return settings


def wrapped_model(
    settings: argparse.Namespace, *, rope: str = "rope", core: Any = None, **changes: Any
) -> tuple[Any, Any]:
    """A transformer's configuration and a GPTModel of it in Megatron's DDP; `core`: another core attention."""
    config = tiny.config(**changes, context_parallel_size=settings.context_parallel_size)
    for name, value in vars(settings).items():
        setattr(config, name, value)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), tiny.build(config, rope=rope, core=core)
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    return config, model


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """As in pretrain_gpt.py of megatron-core 0.12, whose batch MindSpeed slices."""
    batch = get_batch_on_this_cp_rank(dict(next(data_iterator)))
    positions = batch["position_ids"]
    if positions.dim() == 3:  # [batch, axes, tokens]; Megatron wants the axes first
        positions = positions.transpose(0, 1)
    output = model(batch["tokens"], positions, batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_function, batch["loss_mask"])


def loss_function(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Likewise: sums over the static group, multiplied by its size; reports are summed over data-parallel ranks."""
    static = get_full_args().context_parallel_size
    loss = torch.stack([(output.flatten() * loss_mask.flatten()).sum(), loss_mask.sum()])
    if static > 1:
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
    report = loss.clone().detach()
    dist.all_reduce(report, group=parallel_state.get_data_parallel_group())
    tokens = loss[1].clone().detach().to(torch.int)
    return loss[0] * static, tokens, {"lm loss": (report[0], report[1])}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("lengths", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--context-parallel-size", type=int)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        context_parallel_size=arguments.context_parallel_size, create_gloo_process_groups=True
    )
    _, model = wrapped_model(job_settings(arguments.context_parallel_size))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.0), [model])
    dataset = tiny.Sequences(pq.read_table(arguments.lengths).column("length").to_pylist())
    iterator = tiny.data_iterator(dataset)
    records: list[dict[str, Any]] = []
    for _ in range(arguments.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=[model],
            num_microbatches=GLOBAL_BATCH_SIZE // parallel_state.get_data_parallel_world_size(),
            seq_length=128,
            micro_batch_size=1,
            forward_only=False,
        )
        norm = torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]).norm()
        optimizer.step()
        loss, tokens = (sum(float(report["lm loss"][part]) for report in reports) for part in range(2))
        records.append({"loss": loss / tokens, "tokens": int(tokens), "grad_norm": float(norm)})
    weights = torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()
    arguments.results.with_suffix(f".{dist.get_rank()}.json").write_text(
        json.dumps({"records": records, "weights": weights})
    )
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes die in the interpreter's teardown


if __name__ == "__main__":
    main()
