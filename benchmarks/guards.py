"""What the checks and the metrics of a training loop cost the host: `python -m benchmarks.guards [--repeat N]`.

A micro-batch builds a name for messages, looks at its loss and hangs a hook on it, which runs when backward begins, and
asks whether a message of its metrics is due. The same micro-batch is run with and without them, on a loss that costs
nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.switch import NobodyElse
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.gradients import GradientSync
from fcp_cli.runtime.guards import Guards, LossWatch
from fcp_cli.runtime.loader import Shard, load_shard
from fcp_cli.runtime.metrics import Clock, Recorder
from fcp_cli.runtime.rank_agreement import PackDigest
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.step import LocalMicroBatch

_CALLS = 200
_TOKENS = 131_072
_PACKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=50, help="medians are of so many")
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    guards = Guards(NobodyElse(8), GradientSync(), model=GradientSync(), on_nan="stop", losses=LossWatch(Clock()))
    shard, device = _shard(), torch.device("cpu")
    weight = torch.ones((), requires_grad=True)

    def bare() -> None:
        ring = Ring(shard.layout)
        microbatch = LocalMicroBatch(shard, ring, device, is_last=True, guards=guards, denominator=7)
        torch.autograd.backward(weight * 2.0 * microbatch._guards.sync.loss_factor / 7)

    recorder = _recorder()

    def guarded() -> None:
        recorder.enter()
        ring = Ring(shard.layout)
        ring.context.place = guards.place(3, shard.row)
        microbatch = LocalMicroBatch(shard, ring, device, is_last=True, guards=guards, denominator=7)
        guards.poll_losses()
        torch.autograd.backward(microbatch.normalised(weight * 2.0))
        microbatch.require_backward()

    without, with_checks = _microseconds(bare, repeat), _microseconds(guarded, repeat)
    print(f"a micro-batch: {without:.1f} us without checks, {with_checks:.1f} us with: {with_checks - without:.1f} us")

    pack = PackDigest(order=1, member=0, degree=4, rows=range(8), digests=range(8))
    shards = tuple(cast(Shard, _Digested(pack)) for _ in range(_PACKS))

    def agree() -> None:
        same = guards.same_data(3, shards)
        assert same is not None
        same.require()

    print(f"a step of {_PACKS} packs of 8 sequences, their digests compared: {_microseconds(agree, repeat):.1f} us")
    row = _row((0, 1), _TOKENS)
    tokens = torch.arange(_TOKENS)
    whole = _microseconds(lambda: load_shard(row, lambda _: tokens, rank=0), 1, calls=20)
    print(f"in the loader's thread: a pack of {_TOKENS:,} tokens loaded and digested in {whole / 1e3:.2f} ms")


def _recorder() -> Recorder:
    """Return what records a loop, in the midst of a step."""
    path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    store: Any = torch._C._distributed_c10d.HashStore()
    plan: Any = None  # it writes nothing here
    metadata: Any = SimpleNamespace(num_ranks=1)
    recorder = Recorder(path, plan=plan, metadata=metadata, rank=0, device=torch.device("cpu"), store=store)
    recorder.begin(3, 1.0)
    return recorder


class _Digested:
    def __init__(self, digest: PackDigest) -> None:
        self.digest = digest


def _row(ranks: tuple[int, ...], tokens: int) -> MicroBatch:
    return MicroBatch(
        step=3, order=0, wave=-1, ranks=ranks, sequences=(0,), lengths=(tokens,), start_seconds=0.0, seconds=0.0
    )


def _shard() -> Shard:
    return load_shard(_row((0,), 16), lambda _: torch.arange(16), rank=0)


def _microseconds(run: Callable[[], object], repeat: int, *, calls: int = _CALLS) -> float:
    found = []
    for _ in range(repeat):
        begin = time.process_time()  # the machine may be busy with others
        for _ in range(calls):
            run()
        found.append((time.process_time() - begin) / calls * 1e6)
    return median(found)


if __name__ == "__main__":
    main()
