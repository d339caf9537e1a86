"""Micro-batches that `fcp profile` measured and did not fit, as it predicts them: of rings, and of shared heads.

    python -m benchmarks.shared_heads [--ranks N] [--budget-minutes M]    # measures qwen3-tiny on gloo ranks here
    python -m benchmarks.shared_heads --profile profile.yaml              # of a measurement that was made
    python -m benchmarks.shared_heads --kernel                            # attention of fewer heads on one core
    python -m benchmarks.shared_heads --halves                            # what hiding exchanges would bring, predicted

Rings are fitted to one rank and rings, exchanges then to groups that are one set, at three lengths each: other lengths
and rings of sets are predicted. `--kernel` runs the same kernel, forward and backward, on a half, a quarter and an
eighth of 8 query heads, with one of 2 key/value heads, and prints what it takes beside that part of the time that all
take, in processor time: whether the cost model needs a term for few heads.

`--halves` prices a runtime that exchanges the second half of the heads while attention runs on the first: half of the
bytes hidden, and twice the messages of exchanges and rings, for sequences of 4,096 to 65,536 tokens a rank on 8 to 64
ranks of the models and clusters of `benchmarks.split_heads`, where sharing heads beats the ring.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.split_heads import CLUSTERS, MODELS, PER_NODE, alone_seconds, profile_of
from fcp_cli.cost.model import group_terms
from fcp_cli.cost.profile import CostProfile, load_cost_profile
from fcp_cli.runtime.kernels import select_kernel
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
KERNEL_LENGTHS = (512, 1024, 2048)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="a measured profile; without it one is made")
    parser.add_argument("--ranks", type=int, default=4, help="that measure (default %(default)s)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a pack (default %(default)s)")
    parser.add_argument("--budget-minutes", type=float, default=5.0, help="to measure (default %(default)s)")
    parser.add_argument("--kernel", action="store_true", help="time the kernel on fewer heads instead")
    parser.add_argument("--halves", action="store_true", help="price exchanges of half the heads behind attention")
    options = parser.parse_args()
    if options.kernel:
        print_kernel()
    elif options.halves:
        print_halves()
    elif options.profile is not None:
        print_held_out(options.profile)
    else:
        with TemporaryDirectory() as folder:
            print_held_out(measured(options, Path(folder)))


def measured(options: argparse.Namespace, folder: Path) -> Path:
    """Run `fcp profile` on ranks of this machine; return its file."""
    words = ["profile", "--model", "qwen3-tiny", "--ranks", options.ranks, "--max-length", options.max_length]
    words += ["--budget-minutes", options.budget_minutes, "-o", "profile.yaml"]
    subprocess.run([sys.executable, "-m", "fcp_cli", *map(str, words)], cwd=folder, check=True)
    return folder / "profile.yaml"


def print_held_out(path: Path) -> None:
    """Print what was held out of a measured profile, and the mean and the largest error of both kinds of groups."""
    measurement: Any = load_cost_profile(path).measurement
    points = [point for point in measurement["points"] if point["held_out"] and point["degree"] > 1]
    points.sort(key=lambda point: (point.get("heads_degree", 1), point["degree"], sum(point["lengths"])))
    print(f"{'u x r':>6} {'sequences':>9} {'tokens':>6} {'measured ms':>12} {'predicted ms':>13} {'error':>8}")
    for point in points:
        shared = point.get("heads_degree", 1)
        group = f"{shared} x {point['degree'] // shared}"
        times = f"{point['seconds'] * 1e3:12.2f} {point['predicted_seconds'] * 1e3:13.2f}"
        lengths = point["lengths"]
        print(f"{group:>6} {len(lengths):9} {sum(lengths):6} {times} {point['error_percent']:+7.1f}%")
    for name, shares in (("rings", False), ("groups that share heads", True)):
        errors = [abs(point["error_percent"]) for point in points if (point.get("heads_degree", 1) > 1) == shares]
        if errors:
            mean, middle, worst = fmean(errors), median(errors), max(errors)
            print(f"{name}: {len(errors)} held out, off by {mean:.1f} % (median {middle:.1f}), {worst:.1f} % at most")


def print_kernel() -> None:
    """Print what the kernel takes on a part of the heads, over that part of what it takes on all."""
    torch.set_num_threads(1)
    for tokens in KERNEL_LENGTHS:
        whole = kernel_seconds(tokens, HEADS, KV_HEADS)
        cells = [
            f"{heads} of {HEADS}: {kernel_seconds(tokens, heads, max(1, KV_HEADS * heads // HEADS)) / whole * part:.2f}"
            for part, heads in ((2, HEADS // 2), (4, HEADS // 4), (8, HEADS // 8))
        ]
        print(f"{tokens:6} tokens, {whole * 1e3:.0f} ms; {', '.join(cells)}")


def print_halves() -> None:
    """Print the exchanges' share of the time, and what hiding half of their bytes would win."""
    gains, shares = zip(
        *(
            found
            for model, cluster in product(MODELS, CLUSTERS)
            for tokens, degree in product((4096, 16_384, 65_536), (8, 16, 32, 64))
            if (found := gain_of_halves(profile_of(model, cluster), tokens * degree, degree))
        ),
        strict=True,
    )
    print(f"{len(gains)} groups; exchanges take {fmean(shares):.2%} on average, {max(shares):.2%} at most")
    print(f"hiding half of their bytes: {fmean(gains):+.2%} on average, {min(gains):+.2%} to {max(gains):+.2%}")


def gain_of_halves(profile: CostProfile, tokens: int, degree: int) -> tuple[float, float] | None:
    """Return what halves would win of the quickest group's time, and its exchanges' share; None where it is a ring."""
    c, heads = profile.coefficients, profile.heads
    assert heads is not None
    seconds = {u: alone_seconds(profile, tokens, degree, u) for u in (1, *heads.degrees(PER_NODE)) if degree % u == 0}
    shared = min(seconds, key=seconds.__getitem__)
    if shared == 1:
        return None
    terms = group_terms(profile, degree=degree, crosses_nodes=False, heads_degree=shared)
    messages = float(terms.messages)
    exchange = float(terms.exchange) * tokens + messages
    hops = degree // shared - 1
    again = messages + c.ring_hop_seconds * hops + (c.last_hop_seconds if hops else 0.0)
    return ((exchange - messages) / 2 - again) / seconds[shared], exchange / seconds[shared]


def kernel_seconds(tokens: int, heads: int, kv_heads: int, repeats: int = 7) -> float:
    """Return the least processor seconds of a forward and a backward; tensors are views, as an exchange gives them."""
    received = torch.randn(tokens, heads + 2 * kv_heads, HEAD_DIM)
    q, k, v = received.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    kernel, segments = select_kernel("cpu", q.dtype), Ring(shard_layout((tokens,), 1)).work(0)[0].segments
    grad_out, seconds = torch.randn(tokens, heads, HEAD_DIM), []
    for _ in range(repeats):
        begun = time.process_time()
        out, lse = kernel.forward(q, k, v, segments, 1.0)
        kernel.backward(grad_out, q, k, v, out, lse, segments, 1.0)
        seconds.append(time.process_time() - begun)
    return min(seconds)


if __name__ == "__main__":
    main()
