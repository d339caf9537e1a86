"""What following a plan costs the host in a Megatron script, per micro-batch, beside the same script without fcp.

    python -m benchmarks.injection [--repeats N] [--micro-batches N]

One process on the CPU runs Megatron's own schedule over a small GPTModel of two layers, three ways: (a) as it is; (b)
with fcp's attention in place of Megatron's, and nothing else of fcp; (c) under a plan, with all hooks. All read the
same sequences from a data loader, one per micro-batch and on a single rank, and they are so short that no kernel
hides the host. So (c) - (b) is what the hooks do: reading the plan, cutting, collating and checking a batch, its
ring, its rotary table; and (b) - (a) is what the other attention saves or costs here.

The ways take turns, ten steps at a time, so that what a way's loader does in its own thread for the next step falls
into its own time. Of each way the median of its turns is shown, and for the hooks the median of the differences
between neighbouring turns: on the clock, which is what a micro-batch waits, and in processor time of all threads. What
lets Megatron run on a CPU more than doubles the time of every small call of torch, so that the figures are too high.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import tests.runtime.megatron.tiny as tiny  # isort: skip  first: it lets megatron run on the CPU

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.package_info import __version__ as megatron_version
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.attention import Attention
from torch import Tensor

from fcp_cli.integrations.megatron.follow import Follower
from fcp_cli.integrations.megatron.model import MegatronStack
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention
from tests.runtime.plans import Row, write_plan

LARGEST_OVERHEAD_SECONDS = 200e-6
_LENGTH_TOKENS = 16  # so short that kernels do not hide the host
_WARM_UP_STEPS = 2
_TURN_STEPS = 10


class Seconds(NamedTuple):
    """Per micro-batch: on the clock, and of the processor in all threads."""

    clock: float
    processor: float


def main() -> None:
    parser = argparse.ArgumentParser(description="What following a plan costs the host per micro-batch.")
    parser.add_argument("--turns", type=int, default=24, help=f"of {_TURN_STEPS} steps, each way (default 24)")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step (default 8)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = f"{options.turns} turns of {_TURN_STEPS} steps"
    print(f"torch {torch.__version__}, megatron-core {megatron_version}, 1 thread of torch, {turns} of each way")
    with tempfile.TemporaryDirectory() as folder:
        _start_process_group(Path(folder))
        found = _measured(Path(folder), options.turns, options.microbatches)
    alone, bare, planned = (_median(way) for way in zip(*found, strict=True))
    hooks = _median([Seconds(*(c - b for b, c in zip(bare, planned, strict=True))) for _, bare, planned in found])
    _tell("(a) megatron alone", alone)
    _tell("(b) with fcp's attention", bare)
    _tell("(c) under a plan", planned, f"; {planned.clock / alone.clock:.2f} of (a)")
    verdict = "within" if hooks.clock <= LARGEST_OVERHEAD_SECONDS else "OVER"
    _tell("hooks: (c) - (b)", hooks, f"; {verdict} the limit of {1e6 * LARGEST_OVERHEAD_SECONDS:.0f} us")
    os._exit(0)  # gloo's threads sometimes die in the interpreter's teardown


def _median(turns: Iterable[Seconds]) -> Seconds:
    return Seconds(*(median(seconds) for seconds in zip(*turns, strict=True)))


def _tell(what: str, seconds: Seconds, rest: str = "") -> None:
    clock, processor = (1e6 * value for value in seconds)
    print(f"{what:<25}{clock:6.0f} us per micro-batch, {processor:5.0f} us of processor time{rest}", flush=True)


def _start_process_group(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def _measured(folder: Path, turns: int, microbatches: int) -> list[list[Seconds]]:
    """[turns][3] of each way in turn."""
    steps = _WARM_UP_STEPS + turns * _TURN_STEPS
    rows = steps * microbatches
    row = Row([0], [_LENGTH_TOKENS])
    plan = write_plan(folder / "plan.parquet", [[row] * microbatches] * steps, num_ranks=1, rows=rows)
    alone, bare, planned = (_arguments(rows, microbatches) for _ in range(3))
    _attend_with_fcp(bare["model"][0])
    follower = Follower(plan, planned, MegatronStack())
    schedule = schedules.get_forward_backward_func()
    ways: list[Callable[[], Any]] = [
        lambda: schedule(**alone),
        lambda: schedule(**bare),
        lambda: follower.run(schedule, planned),
    ]
    models = [arguments["model"][0] for arguments in (alone, bare, planned)]
    for way, model in zip(ways, models, strict=True):
        _turn(way, model, _WARM_UP_STEPS, microbatches)
    return [
        [_turn(way, model, _TURN_STEPS, microbatches) for way, model in zip(ways, models, strict=True)]
        for _ in range(turns)
    ]


def _turn(way: Callable[[], Any], model: DistributedDataParallel, steps: int, microbatches: int) -> Seconds:
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        model.zero_grad_buffer()
        way()
    taken = (time.perf_counter() - clock, time.process_time() - processor)
    return Seconds(*(seconds / steps / microbatches for seconds in taken))


def _attend_with_fcp(model: DistributedDataParallel) -> None:
    """On one ring that never changes, with nothing around it."""
    ring = Ring(shard_layout((_LENGTH_TOKENS,), 1))

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        out = attention(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)), ring=ring)
        return out.permute(2, 0, 1, 3).flatten(2)

    for module in model.modules():
        if isinstance(module, Attention):
            module.core_attention.forward = attend


def _arguments(rows: int, microbatches: int) -> dict[str, Any]:
    """Of the schedule, as a script gives them."""
    settings = tiny.config(params_dtype=torch.float32, pipeline_dtype=torch.float32)
    ddp_config = DistributedDataParallelConfig()
    model = DistributedDataParallel(settings, ddp_config, tiny.build(settings))
    settings.finalize_model_grads_func = finalize_model_grads
    settings.no_sync_func = model.no_sync
    return {
        "forward_step_func": tiny.forward_step,
        "data_iterator": tiny.data_iterator(tiny.Sequences([_LENGTH_TOKENS] * rows)),
        "model": [model],
        "num_microbatches": microbatches,
        "micro_batch_size": 1,
        "seq_length": _LENGTH_TOKENS,
        "forward_only": False,
    }


if __name__ == "__main__":
    main()
