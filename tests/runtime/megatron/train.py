"""A Megatron training script that knows nothing of fcp: `train.py LENGTHS RESULTS --steps N [--save F] [--load F]`.

It does what a script on top of megatron-core does: parallel state, GPTModel, DDP, Megatron's optimizer, schedule and
finalize_model_grads, a data loader that goes on after the samples consumed, and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "stand_in"))  # megatron.training, which PyPI's megatron-core has not

import tests.runtime.megatron.tiny as tiny  # isort: skip  first: it lets megatron run on the CPU

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.training import global_vars  # of the stand-in

from fcp_cli.util import processes

try:  # from 0.19 on
    from megatron.core.utils import get_batch_on_this_tp_rank as broadcast
except ImportError:
    broadcast = None
    from megatron.training.utils import get_batch_on_this_tp_rank

GLOBAL_BATCH_SIZE, SEQ_LENGTH = 8, 128
COMPILED = "FCP_TEST_COMPILED"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("lengths", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--exit-interval", type=int)
    parser.add_argument("--stopped-in", type=int, help="step in which one rank is asked to stop")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--grad-reduce-in-bf16", action="store_true")
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--clip-grad", type=float, default=0.0)
    return parser.parse_args()


def types_of_cuda() -> None:
    """Megatron's optimizers of bf16 sort parameters by the names of CUDA's tensor types."""
    named = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}
    type_of = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *args: (  # type: ignore[method-assign, assignment]
        type_of(tensor, *args) if args else named[tensor.dtype]
    )


def model_of(settings: Any, arguments: argparse.Namespace) -> DistributedDataParallel:
    """As `get_model` of Megatron's training loop makes it."""
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        bucket_size=4000,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
        grad_reduce_in_fp32=arguments.bf16 and not arguments.grad_reduce_in_bf16,
    )
    built = tiny.build(settings)
    return DistributedDataParallel(settings, ddp_config, Float16Module(settings, built) if arguments.bf16 else built)


def state_of(model: Any, optimizer: Any, consumed: int, *, is_loading: bool = False) -> dict[str, Any]:
    """What Megatron's own training loop saves with --ckpt-format torch_dist."""
    weights = model.module.sharded_state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading),
        "consumed_train_samples": consumed,
    }


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """As in `pretrain_gpt.py`, whose first tensor-parallel process has the data."""
    batch = get_batch_on_this_tp_rank(data_iterator) if broadcast is None else broadcast_batch(data_iterator)
    return tiny.forward_step(iter([batch]), model)


def broadcast_batch(data_iterator: Any) -> Any:
    """Read where the data is, and hand it on as Megatron does from 0.19 on."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    return broadcast(
        next(data_iterator) if rank == 0 else {},
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=True,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=rank,
        micro_batch_size=1,
        seq_length=SEQ_LENGTH,
        mtp_on_this_rank=False,
    )


def main() -> None:
    if COMPILED not in os.environ:  # Megatron compiles what it fuses, for longer than the steps take
        torch.compiler.set_stance("force_eager")
    arguments = parse()
    global_vars.set_args(arguments)
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if arguments.bf16 else torch.float64
    torch.set_default_dtype(torch.float32 if arguments.bf16 else dtype)
    if arguments.bf16:
        types_of_cuda()
    dist.init_process_group("gloo")
    tensor_parallel, pipeline_parallel = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel, create_gloo_process_groups=True)
    settings = tiny.config(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        bf16=arguments.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    model = model_of(settings, arguments)
    settings.finalize_model_grads_func = finalize_model_grads
    settings.no_sync_func = model.no_sync
    optimizing = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        clip_grad=arguments.clip_grad,
        bf16=arguments.bf16,
        params_dtype=dtype,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizing, [model])
    consumed = 0
    if arguments.load is not None:
        saved = dist_checkpointing.load(state_of(model, optimizer, 0, is_loading=True), str(arguments.load))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        consumed = saved["consumed_train_samples"]

    dataset = tiny.Sequences(pq.read_table(arguments.lengths).column("length").to_pylist())
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    iterator = tiny.data_iterator(dataset, consumed=consumed) if is_first else None
    forward_backward = get_forward_backward_func()
    microbatches = GLOBAL_BATCH_SIZE // parallel_state.get_data_parallel_world_size()
    records: list[dict[str, Any]] = []
    while consumed < arguments.steps * GLOBAL_BATCH_SIZE:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        if consumed == (arguments.stopped_in or -1) * GLOBAL_BATCH_SIZE and dist.get_rank() == 1:
            os.kill(os.getpid(), processes.STOP)
        reports = forward_backward(
            forward_step_func=forward_step if tensor_parallel > 1 else tiny.forward_step,
            data_iterator=iterator,
            model=[model],
            num_microbatches=microbatches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        loss, tokens = (sum(report["lm loss"] for report in reports) + torch.zeros(2)).clone()
        total = torch.stack([loss, tokens])
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())  # the last stage has it
        norm = torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]).norm()
        _, whole_norm, _ = optimizer.step()
        if arguments.clip_grad:
            norm = whole_norm  # a distributed optimizer reduces only a part of the gradient on each rank
        consumed += GLOBAL_BATCH_SIZE
        records.append({"loss": float(total[0] / total[1]), "tokens": int(total[1]), "grad_norm": float(norm)})
        # As in `checkpoint_and_decide_exit` of `megatron.training`; the script saves below.
        if arguments.exit_interval and consumed // GLOBAL_BATCH_SIZE % arguments.exit_interval == 0:
            break
    if arguments.save is not None:
        arguments.save.mkdir(exist_ok=True)
        dist_checkpointing.save(state_of(model, optimizer, consumed), str(arguments.save))
    weights = torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()
    arguments.results.with_suffix(f".{dist.get_rank()}.json").write_text(
        json.dumps({"records": records, "weights": weights})
    )
    dist.barrier()
    dist.destroy_process_group()
    for child in multiprocessing.active_children():  # dist_checkpointing's, which only an exit handler would end
        child.terminate()
    os._exit(0)  # gloo's threads sometimes die in the interpreter's teardown


if __name__ == "__main__":
    main()
