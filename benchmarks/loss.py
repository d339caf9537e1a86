"""The loss of a linear head with and without whole logits: memory beside the inputs, time, and agreement, on this CPU.

    python -m benchmarks.loss [--repeats N]

Memory is the peak of what PyTorch has allocated in forward and backward beyond hidden states, weight and labels, so it
holds their gradients, too. Both sides run in turn on one thread, and processor time is compared; the ratio is the
median over the pairs. Blocks of logits are cut to an eighth of all, as they are on an accelerator into more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.memory import allocated_peak
from fcp_cli.runtime import loss
from fcp_cli.runtime.loss import chunked_token_loss_sum, token_loss_sum

# tokens, width, vocabulary
SIZES = ((1024, 256, 512), (1024, 256, 8192), (512, 512, 151_936))
BLOCKS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="The loss with and without whole logits.")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs per ratio (default 5)")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| tokens | width | vocabulary | type | plain MB | chunked MB | plain s | chunked s | ratio | difference |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, width, vocabulary in SIZES:
            print_row(tokens, width, vocabulary, dtype, repeats)


def print_row(tokens: int, width: int, vocabulary: int, dtype: torch.dtype, repeats: int) -> None:
    loss.LOGITS_BYTES = 4 * tokens * vocabulary // BLOCKS
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, width, generator=draw).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens), generator=draw)
    ways = {
        "plain": partial(gradients, lambda: token_loss_sum(hidden @ weight.T, labels), hidden, weight),
        "chunked": partial(
            gradients, lambda: chunked_token_loss_sum(hidden[0], weight, None, labels[0]), hidden, weight
        ),
    }
    found = {name: way() for name, way in ways.items()}
    apart = max(
        float((one - other).float().norm() / other.float().norm())
        for one, other in zip(found["chunked"], found["plain"], strict=True)
    )
    del found
    peaks = {name: allocated_peak(way) / 1e6 for name, way in ways.items()}
    seconds = [{name: processor_seconds(way) for name, way in ways.items()} for _ in range(repeats)]
    plain, chunked = (median(pair[name] for pair in seconds) for name in ("plain", "chunked"))
    ratio = median(pair["chunked"] / pair["plain"] for pair in seconds)
    print(
        f"| {tokens} | {width} | {vocabulary} | {str(dtype).removeprefix('torch.')} | {peaks['plain']:.0f} "
        f"| {peaks['chunked']:.0f} | {plain:.2f} | {chunked:.2f} | {ratio:.2f} | {apart:.0e} |",
        flush=True,
    )


def gradients(loss: Callable[[], Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss() / 1000, leaves)


def processor_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
