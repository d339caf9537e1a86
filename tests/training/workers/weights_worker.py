"""Loads a checkpoint into a sharded model on every rank, and writes it again: `-m tests.training.workers.weights_worker FROM TO SHARDS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from fcp_cli.models.weights import find_weights
from fcp_cli.training.weights import export_model, load_weights, match_weights
from tests.runtime.workers.leave import leave_job


def main(source: Path, target: Path, shards: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # every value has to come from the files
    family: Any = AutoModelForCausalLM
    model = family.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("copies", "shards"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights = find_weights(source)
    names = match_weights(model, weights)
    load_weights(model, weights, names)
    export_model(
        model, target, rank=rank, num_ranks=ranks, barrier=dist.barrier, dtype=torch.float32, names=names, source=source
    )
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
