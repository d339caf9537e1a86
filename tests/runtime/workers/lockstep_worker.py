"""A rank of a model whose layers sleep, and meet the other ranks before each layer as FSDP2's gathers do."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Run one wave three times; rank 0 writes the quickest."""
    out, modules = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank, took = int(os.environ["RANK"]), []
    for _ in range(4):  # the first connects
        dist.barrier()
        started = time.perf_counter()
        for module in modules:
            for _layer in range(module["layers"]):
                dist.all_reduce(torch.ones(1))
                time.sleep(module["seconds"][rank] / module["layers"])
        dist.barrier()
        took.append(time.perf_counter() - started)
    if rank == 0:
        out.write_text(json.dumps(min(took[1:])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
