"""What starting and saving a sharded model takes: host memory of a rank against the files, and the time of a step.

    python -m benchmarks.loading                          # 4 gloo ranks, ZeRO-3, a model of 0.2 billion parameters
    python -m benchmarks.loading --layers 48 --ranks 8

Memory is the most that a rank held beyond what it held before there was a model, every 5 ms: its own (what it wrote),
and pages of the mapped files, which the system takes back when it needs them. Copies of one tensor are in it, and the
shard that stays. Times are of rank 0: what a step waits for that saves, and until the checkpoint is whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

from fcp_cli.util.processes import torchrun_argv

_EVERY_SECONDS = 0.005


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--file-megabytes", type=int, default=100, help="the largest file of the checkpoint")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker)
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole, largest = write_checkpoint(folder / "checkpoint", options.layers, options.file_megabytes)
        argv = [*torchrun_argv(options.ranks), "-m", "benchmarks.loading", "--worker", str(folder)]
        subprocess.run(argv, check=True, stdout=sys.stderr)
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    print(f"{options.ranks} ranks, ZeRO-3, fp32: {whole / 1e6:.0f} MB in files of at most {largest / 1e6:.0f} MB\n")
    print("| start | a rank's share, MB | most beyond nothing, MB | of it mapped files, MB | seconds |")
    print("|---|---|---|---|---|")
    for kind in ("random weights", "checkpoint"):
        worst = max((rank[kind] for rank in ranks), key=lambda found: found["own_bytes"])
        print(
            f"| {kind} | {worst['share_bytes'] / 1e6:.0f} | {(worst['own_bytes'] + worst['file_bytes']) / 1e6:.0f} "
            f"| {worst['file_bytes'] / 1e6:.0f} | {worst['seconds']:.1f} |"
        )
    print("\n| save | the step waits, s | until it is whole, s | copy on the host, MB a rank |")
    print("|---|---|---|---|")
    for kind in ("in the background, first", "in the background, later", "--no-async-save"):
        found = ranks[0][kind]
        print(f"| {kind} | {found['waits']:.2f} | {found['whole']:.2f} | {found['copy_bytes'] / 1e6:.0f} |")


def write_checkpoint(folder: Path, layers: int, megabytes: int) -> tuple[int, int]:
    """Write a checkpoint of random weights in fp32; return the bytes of all its files, and of the largest."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32_000,
        tie_word_embeddings=True,
    )
    family: Any = AutoModelForCausalLM
    family.from_config(config).save_pretrained(folder, max_shard_size=f"{megabytes}MB")
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes), max(sizes)


def work(folder: Path) -> None:
    """Measure on one rank."""
    import torch
    import torch.distributed as dist

    from fcp_cli.training.weights import build_model

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    build_model("qwen3-tiny", seed=0, device=torch.device("cpu"))  # what is imported and kept once
    measured: dict[str, Any] = {}
    for kind in ("random weights", "checkpoint"):
        dist.barrier()
        measured[kind], model = measure_start(folder / "checkpoint", is_random=kind == "random weights")
    measured |= measure_saves(folder / "saved", model)
    (folder / f"rank-{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def measure_start(checkpoint: Path, *, is_random: bool) -> tuple[dict[str, float], Any]:
    """Build, shard and fill a model as the trainer does."""
    import torch

    from fcp_cli.cost.recipe import Recipe
    from fcp_cli.models.weights import find_weights
    from fcp_cli.training.sharding import open_shares
    from fcp_cli.training.weights import build_model, draw_weights, load_weights, match_weights, shard_model

    begin = time.perf_counter()
    with most_memory() as most:
        model: Any = build_model(str(checkpoint), seed=0, device=torch.device("cpu"), is_filled=False)
        weights = find_weights(checkpoint)
        names = match_weights(model, weights)
        import torch.distributed as dist

        shares = open_shares(Recipe(zero_stage=3), rank=dist.get_rank(), ranks=dist.get_world_size(), device_type="cpu")
        assert shares.mesh is not None
        shard_model(model, shares.mesh, dtype=None, keeps_weights=False)
        if is_random:
            draw_weights(model, 0)
        else:
            load_weights(model, weights, names)
    seconds = time.perf_counter() - begin
    share = sum(parameter.to_local().numel() * parameter.element_size() for parameter in model.parameters())
    own, file = most()
    return {"share_bytes": share, "own_bytes": own, "file_bytes": file, "seconds": seconds}, model


def measure_saves(folder: Path, model: Any) -> dict[str, dict[str, float]]:
    """Save weights and AdamW's state three times."""
    import torch
    import torch.distributed as dist

    from fcp_cli.runs.checkpoints import CheckpointHeader
    from fcp_cli.runtime.transport import ProcessWorld
    from fcp_cli.training.checkpoint import CheckpointSaver, TrainState
    from fcp_cli.training.sharding import Shares

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    rank, count = dist.get_rank(), dist.get_world_size()
    state = TrainState(
        weights=dict(model.named_parameters()),
        buffers={},
        optimizer=optimizer,
        device=torch.device("cpu"),
        shares=Shares(index=rank, count=count),
    )
    measured = {}
    session: Any = SimpleNamespace(rank=rank, world=ProcessWorld())
    background = CheckpointSaver(folder, session, keep=1, in_background=True)
    waiting = CheckpointSaver(folder, session, keep=1, in_background=False)
    ways = (
        ("in the background, first", background),
        ("in the background, later", background),
        ("--no-async-save", waiting),
    )
    for step, (kind, saver) in enumerate(ways, start=1):
        header = CheckpointHeader(
            step=step, plan_hash="", num_ranks=count, sharding="sharded", model="", torch="", shards=count
        )
        dist.barrier()
        begin = time.perf_counter()
        saver.save(header, state)
        waits = time.perf_counter() - begin
        saver.finish()
        copy = 0 if saver is waiting else 3 * sum(p.to_local().numel() * 4 for p in model.parameters())
        measured[kind] = {"waits": waits, "whole": time.perf_counter() - begin, "copy_bytes": copy}
    return measured


@contextmanager
def most_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Watch this process; yield what returns the most bytes of its own and of files at one moment of the block."""
    before, done = resident_bytes(), Event()
    most = (0, 0)

    def watch() -> None:
        nonlocal most
        while not done.wait(_EVERY_SECONDS):
            now = resident_bytes()
            most = max(most, (now[0] - before[0], now[1] - before[1]))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most
    finally:
        done.set()
        thread.join()


def resident_bytes() -> tuple[int, int]:
    """Return the bytes that this process holds: its own, and pages of files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, file, shared = (int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem"))
    return own + shared, file


if __name__ == "__main__":
    main()
