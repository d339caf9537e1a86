"""Megatron-Bridge's own training step, data sampler, forward step and loss, around a small GPTModel: LENGTHS RESULTS [LOADER].

Bridge imports what only machines with GPUs have (Transformer Engine, ModelOpt). So its files are run without what they
import from Bridge itself and from there: the calls that pass through them are given here, and do nothing.
"""

from __future__ import annotations
import __future__

import ast
import json
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import tests.runtime.megatron.tiny as tiny  # isort: skip  first: it lets megatron run on the CPU

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from fcp_cli.integrations.megatron.data import hook_cycling

BRIDGE = Path(os.environ["FCP_MEGATRON_BRIDGE_SOURCE"]) / "src" / "megatron" / "bridge"
GLOBAL_BATCH_SIZE, STEPS = 8, 12
_ABSENT = ("megatron.bridge", "modelopt", "nvidia_resiliency_ext", "transformer_engine")


def file_of_bridge(path: str, **given: Any) -> dict[str, Any]:
    """What a file of Bridge defines, with `given` in place of what it imports from elsewhere in Bridge."""
    source = ast.parse((BRIDGE / path).read_text())
    module = ModuleType(path.replace("/", "_").removesuffix(".py"))
    sys.modules[module.__name__] = module  # decorators look their callers up
    found = vars(module)
    for part in source.body:
        absent = isinstance(part, ast.ImportFrom) and str(part.module).startswith(_ABSENT)
        absent = absent or (isinstance(part, ast.Import) and part.names[0].name.startswith(_ABSENT))
        if absent and isinstance(part, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name for alias in part.names]
            found |= {name: given.get(name, MagicMock(name=name)) for name in names}
        else:
            exec(compile(ast.Module([part], []), path, "exec", __future__.annotations.compiler_flag), found)
    return found


def configuration(settings: Any, loader: str) -> Any:
    """Of the fields of Bridge's `ConfigContainer` those that a step reads."""
    return SimpleNamespace(
        model=SimpleNamespace(seq_length=128, qk_clip=False, virtual_pipeline_model_parallel_size=None),
        train=SimpleNamespace(
            micro_batch_size=1,
            empty_unused_memory_level=0,
            check_optimizer_step_success=False,
            skip_sync_grad_norm_across_mp=True,
        ),
        optimizer=SimpleNamespace(
            barrier_with_L1_time=False, log_num_zeros_in_grad=False, reuse_grad_buf_for_mxfp8_param_ag=False
        ),
        ddp=SimpleNamespace(overlap_param_gather=False),
        dataset=SimpleNamespace(dataloader_type=loader, skip_getting_attention_mask_from_dataset=False),
        dist=SimpleNamespace(use_decentralized_pg=True),
        rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=True, check_for_spiky_loss=False),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )


def padded(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate items of several lengths, as Bridge's fine-tuning does: all as long as the longest."""
    most = max(len(item["tokens"]) for item in items)
    short = [{name: item[name] for name in ("tokens", "labels", "loss_mask", "position_ids")} for item in items]
    found: dict[str, Any] = {
        name: torch.stack([pad(item[name], (0, most - len(item[name]))) for item in short]) for name in short[0]
    }
    mask = torch.ones(len(items), 1, most, most, dtype=torch.bool).triu(1)
    return found | {"attention_mask": mask}


def importable(*names: str) -> None:
    """Let these modules of Bridge be imported without its packages' own code, which imports all of it."""
    for package in ("megatron.bridge", "megatron.bridge.data"):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(BRIDGE.joinpath(*package.split(".")[2:]))]
    for name in names:
        import_module(name)


def main(lengths: Path, results: Path, loader: str = "single") -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    init_num_microbatches_calculator(dist.get_rank(), None, GLOBAL_BATCH_SIZE, 1, ranks)
    settings = tiny.config()
    model = DistributedDataParallel(settings, DistributedDataParallelConfig(), tiny.build(settings))
    settings.finalize_model_grads_func = finalize_model_grads
    settings.no_sync_func = model.no_sync
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.0), [model])

    groups = ProcessGroupCollection.use_mpu_process_groups()
    losses = file_of_bridge("training/losses.py")
    step = file_of_bridge(
        "training/gpt_step.py",
        masked_next_token_loss=losses["masked_next_token_loss"],
        get_model_chunk_vp_stage=lambda model: None,
        get_pg_collection=lambda model: groups,
        accumulate_flops_metadata=lambda *_, **__: None,
    )
    train_step = file_of_bridge("training/train.py")["train_step"]
    samplers = file_of_bridge("data/samplers.py")
    state = MagicMock(cfg=configuration(settings, loader))
    dataset = tiny.Sequences(pq.read_table(lengths).column("length").to_pylist())
    sampler = samplers["MegatronPretrainingSampler"](len(dataset), 0, 1, rank, ranks)
    rows: Any = DataLoader(dataset, batch_sampler=sampler)
    if loader == "batch":
        importable("megatron.bridge.data.batch_utils")
        whole = samplers["MegatronPretrainingBatchSampler"]
        sampler = whole(len(dataset), 0, 1, GLOBAL_BATCH_SIZE, rank, ranks, shuffle=False)
        rows = DataLoader(dataset, batch_sampler=sampler, collate_fn=padded)
        cycling = ModuleType("megatron.bridge.data.loaders")
        cycling.__dict__.update(file_of_bridge("data/loaders.py"))
        if "FCP_PLAN" in os.environ:  # the file is run, not imported, so that nothing hooks it
            hook_cycling(cycling)
        rows = cycling.cyclic_iter(rows)
    iterator = RerunDataIterator(iter(rows))
    forward_backward = get_forward_backward_func(pp_size=1, vp_size=None)
    found = []
    for _ in range(STEPS):
        reports, *_ = train_step(
            partial(step["forward_step"], state),
            iterator,
            [model],
            optimizer,
            MagicMock(),
            state,
            groups,
            forward_backward,
            None,
        )
        found.append(float(reports["lm loss"]))
    weights = torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()
    results.with_suffix(f".{rank}.json").write_text(json.dumps({"losses": found, "weights": weights}))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes die in the interpreter's teardown


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
