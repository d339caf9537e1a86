"""What ring attention issues beside its kernel, counted without a GPU: operations, messages, bytes; before and after.

    python -m benchmarks.ring_ops [--json PATH] [--before PATH]

One attention layer of Qwen3-8B's heads (32 query, 8 key/value heads of 128, bf16) runs on every member of a ring on
meta tensors with the CUDA kernel: shapes flow through the operators' own shape functions, nothing is computed, and what
a GPU would be given is counted, for the member that has most of each. A first layer is not counted: it makes the
indices that all layers share.

- operations: those that start a kernel; views and allocations do not.
- messages, sent: point-to-point batches and the bytes that a member sends.
- moved: bytes that operations other than flash attention read and write.
- merge: the share of that for merging partial results.
- gathers, key_gathers: operations that read scattered rows of the member's own tensors, and of keys that arrived.

Gradients travel in fp32 in the pass `backward`, and in the type of the keys in `bf16`, which is compared with it too.

The column `before` is `benchmarks/ring_ops.json`, written by this program on the commit that the file names.

Then groups of u x r ranks that share heads: what a member sends in the forward and backward of a layer, beside what the
cost model says that it sends; and the same of a layer whose tokens attend to a window.

The last table counts messages of rings that no attention kernel hides: none starts between issue and wait.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fcp_cli.cost.model import group_terms, halo_seconds, window_work
from fcp_cli.cost.profile import Bandwidth
from fcp_cli.cost.recipe import Recipe
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.runtime import ring_passes, rows
from fcp_cli.runtime.choices import GradRingDtype
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.kernels.cuda import CudaFlashKernel
from fcp_cli.runtime.layout import ShardLayout, shard_layout
from fcp_cli.runtime.ring import AttentionSpec, Ring
from fcp_cli.runtime.ring_attention import attend_compiled, attention, group_backward, group_forward
from fcp_cli.runtime.rows import merge
from fcp_cli.runtime.transport import Handle, drive
from fcp_cli.util.masks import Mask, full, segments

BACKWARDS: dict[str, GradRingDtype] = {"backward": "fp32", "bf16": "bf16"}
PASSES = ("forward", *BACKWARDS)
BEFORE = Path(__file__).with_suffix(".json")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
RANK_TOKENS = 16_384
WINDOW = 1024
MIB = 1 << 20


def _pack(sequences: int, degree: int) -> tuple[int, ...]:
    """Cut what `degree` ranks of 16k tokens hold into sequences of nearly equal length."""
    each, longer = divmod(RANK_TOKENS * degree, sequences)
    return tuple(each + (i < longer) for i in range(sequences))


PACKS: dict[str, tuple[tuple[int, ...], int]] = {
    "degree 2, one sequence": (_pack(1, 2), 2),
    "degree 2, 32 sequences": (_pack(32, 2), 2),
    "degree 4, 500 sequences": (_pack(500, 4), 4),
    "degree 4, half in one, half in 250": ((2 * RANK_TOKENS, *_pack(250, 2)), 4),
    "degree 8, one sequence": (_pack(1, 8), 8),
    "degree 8, 8 sequences": (_pack(8, 8), 8),
}


SHARED = tuple((u, r) for u in (1, 2, 4, 8, 16) for r in (1, 2, 4, 8) if 1 < u * r <= 16)
"""Heads degrees and ring degrees; 16 ranks hold two copies of each key/value head."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """Of one pass of one member over one layer."""

    operations: int = 0
    messages: int = 0
    sent_bytes: int = 0
    moved_bytes: int = 0
    merge_bytes: int = 0
    gathers: int = 0
    key_gathers: int = 0


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self.merges = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _launches(func) and any(tensor.device.type == "meta" for tensor in _tensors((args, kwargs, out))):
            self.counts.operations += 1
            if _name(func) in GATHERS:
                is_of_keys = args[0].dim() > 2 and args[0].shape[-2] == KV_HEADS
                self.counts.key_gathers += is_of_keys
                self.counts.gathers += not is_of_keys
            moved = _moved_bytes(func, args, kwargs or {}, out)
            self.counts.moved_bytes += moved
            self.counts.merge_bytes += moved * self.merges
        return out


class CountingTransport:
    """A transport on which everything is there at once."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        self._counter.counts.messages += 1
        if send is not None:
            self._counter.counts.sent_bytes += send.numel() * send.element_size()
        return _Arrived()


class _Arrived:
    def wait(self) -> None:
        pass


ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FLASH = {"_flash_attention_forward", "_flash_attention_backward"}
GATHERS = {"index_select", "index", "take_rows"}


def _name(func: Any) -> str:
    name: str = func._schema.name.split("::")[-1]
    return name


def _launches(func: Any) -> bool:
    """Return whether an operator starts a kernel: it does not allocate, nor is what it returns a view."""
    returns = func._schema.returns
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    return _name(func) not in ALLOCATIONS and not is_view


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a reader of the whole tensor fetches; an expanded dimension lies in memory once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def _moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that an operator reads and writes: its inputs, and what it returns or changes."""
    name = _name(func)
    if name in FLASH:
        return 0
    if name in ROW_WISE:
        return ROW_WISE[name](args, out)
    given = [
        (args[i] if i < len(args) else kwargs.get(argument.name), argument)
        for i, argument in enumerate(func._schema.arguments)
    ]
    # A copy, a fill or an `out=` only writes its target.
    only_written = [value for value, argument in given if argument.is_out or name in ("copy_", "fill_", "zero_")][:1]
    read = [tensor for value, _ in given for tensor in _tensors(value) if not any(tensor is w for w in only_written)]
    return sum(map(_bytes, read)) + sum(map(_bytes, _tensors(out)))


def _rows_read(args: tuple[Any, ...], out: Any) -> int:
    """A gather, whose last argument is the index: it reads the rows that it returns."""
    return _bytes(args[-1]) + 2 * sum(map(_bytes, _tensors(out)))


def _rows_replaced(args: tuple[Any, ...], out: Any) -> int:
    """`index_copy_(target, dim, index, rows)`."""
    return _bytes(args[2]) + 2 * _bytes(args[3])


def _rows_changed(args: tuple[Any, ...], out: Any) -> int:
    """`index_add_(target, dim, index, rows)`."""
    return _bytes(args[2]) + 3 * _bytes(args[3])


def _rows_merged(args: tuple[Any, ...], out: Any) -> int:
    """`fcp::merge_rows(source, into, also, lse, positions, part, part_lse)`."""
    *targets, _, positions, part, part_lse = args
    elements: int = sum(tensor.element_size() for tensor in (*targets, part) if tensor is not None)
    numel: int = part.numel()
    return numel * elements + 3 * _bytes(part_lse) + (0 if positions is None else _bytes(positions))


def _rows_added(args: tuple[Any, ...], out: Any) -> int:
    """`fcp::add_rows(source, into, positions, share)`."""
    *targets, positions, share = args
    elements: int = sum(tensor.element_size() for tensor in (*targets, share) if tensor is not None)
    numel: int = share.numel()
    return numel * elements + (0 if positions is None else _bytes(positions))


def _pair_added(args: tuple[Any, ...], out: Any) -> int:
    """`fcp::add_pair_rows(total, positions, first, second)`."""
    total, positions, *shares = args
    moved: int = sum(share.numel() * (share.element_size() + 2 * total.element_size()) for share in shares)
    return moved + (0 if positions is None else _bytes(positions))


ROW_WISE: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "merge_rows": _rows_merged,
    "add_rows": _rows_added,
    "add_pair_rows": _pair_added,
    "take_rows": _rows_read,
    "index_select": _rows_read,
    "index_copy_": _rows_replaced,
    "index_add_": _rows_changed,
}


def count_pack(
    lengths: tuple[int, ...], degree: int, heads_degree: int = 1, window: int | None = None
) -> dict[str, Counts]:
    """Return the counts of every pass, each the most over the group's members."""
    layout = shard_layout(lengths, degree, heads_degree)
    with pretended_gpu():
        members = [_count_member(layout, index, window) for index in range(degree)]
    return {
        name: Counts(**{f.name: max(getattr(member[name], f.name) for member in members) for f in fields(Counts)})
        for name in PASSES
    }


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Treat meta tensors as those of a GPU with triton."""
    with (
        mock.patch.object(ring_passes, "select_kernel", lambda device_type, dtype: CudaFlashKernel()),
        mock.patch.object(rows, "fused_rows", lambda device_type: True),
    ):
        yield


def _count_member(layout: ShardLayout, index: int, window: int | None) -> dict[str, Counts]:
    counter = Counter()
    ring = Ring(layout, index, tuple(range(layout.degree)), CountingTransport(counter))
    q, grad_out, k, v = (
        torch.empty(ring.tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device="meta")
        for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)
    )

    def layer() -> dict[str, Counts]:
        counter.counts = forward = Counts()
        _, kept = drive(group_forward(ring, q, k, v, AttentionSpec(1.0, window)))
        counts = {"forward": forward}
        for name, grad_dtype in BACKWARDS.items():
            counter.counts = counts[name] = Counts()
            ring.grad_dtype = grad_dtype
            drive(group_backward(ring, grad_out, kept, AttentionSpec(1.0, window), kv_heads=KV_HEADS))
        return counts

    def counted_merge(*args: Any) -> None:
        counter.merges = True
        merge(*args)
        counter.merges = False

    with mock.patch.object(ring_passes, "merge", counted_merge), counter:
        layer()
        return layer()


def count_sent(u: int, r: int, window: int | None = None) -> Counts:
    """Return the messages and bytes of a member of u x r in the forward and backward of a layer, one long sequence."""
    passes = count_pack(_pack(1, u * r), u * r, u, window)
    both = passes["forward"], passes["backward"]
    return Counts(messages=sum(one.messages for one in both), sent_bytes=sum(one.sent_bytes for one in both))


def predicted_sent(u: int, r: int, window: int | None = None) -> Counts:
    """Return what the cost model says of one layer: seconds where a message takes one, then where a byte does."""
    messages = _priced(u, r, window, message_seconds=1, bytes_per_second=math.inf)
    moved = _priced(u, r, window, message_seconds=0, bytes_per_second=1)
    messages += r > 1 and window is None  # the gradients' last hop, which no price needs: a kernel hides it
    return Counts(messages=round(messages), sent_bytes=round(moved))


def _priced(u: int, r: int, window: int | None, *, message_seconds: float, bytes_per_second: float) -> float:
    layer = replace(load_model("qwen3-8b"), num_layers=1)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    if window is not None:
        layer = replace(layer, attention=("window",), window_tokens=window)
    cluster = replace(load_cluster("h100-8x8"), message_seconds=1.0)
    profile = analytic_profile(layer, cluster, recipe=Recipe(), sync="iteration", ranks=u * r)
    assert profile.heads is not None
    c = profile.coefficients
    profile = replace(
        profile,
        bandwidth=Bandwidth(intra_node=bytes_per_second, inter_node=bytes_per_second),
        heads=replace(profile.heads, exchange_seconds=message_seconds * profile.heads.exchange_seconds),
        coefficients=replace(
            c,
            ring_hop_seconds=message_seconds * c.ring_hop_seconds,
            last_hop_seconds=message_seconds * c.last_hop_seconds,
            halo_message_seconds=message_seconds * c.halo_message_seconds,
        ),
    )
    terms, tokens = group_terms(profile, degree=u * r, heads_degree=u, crosses_nodes=False), RANK_TOKENS * u * r
    exchanged = terms.exchange * tokens + terms.messages
    if window is not None:
        return float(exchanged + halo_seconds(profile, window_work(np.array([tokens]), profile.coefficients), terms)[0])
    return float(exchanged + terms.ring * tokens + terms.hops)


PATHS: dict[str, dict[str, Any]] = {
    "ring": {},
    "ring, full masks": {"masks": (full(), full())},
    "ring, segments": {"masks": (segments([(100, 200)]), segments([(7, 300)]))},
    "ring, values of another size": {"value_dim": 16},
    "2 x ring": {"heads_degree": 2},
    "ring, compiled": {"compiled": True},
    "2 x ring, compiled": {"heads_degree": 2, "compiled": True},
}
"""Arguments of `count_unhidden` beside the degree of the ring."""


class HidingTransport:
    """Transport on which zeros arrive at once; it records ring messages with no kernel between issue and wait."""

    def __init__(self) -> None:
        self.kernels = 0
        self.unhidden: list[str] = []

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        if receive is not None:
            receive.zero_()
        return _InFlight(self, kind, self.kernels)


@dataclass(slots=True)
class _InFlight:
    transport: HidingTransport
    kind: str
    kernels_before: int

    def wait(self) -> None:
        if "kv" in self.kind and self.transport.kernels == self.kernels_before:
            self.transport.unhidden.append(self.kind)


class _CountedKernel(CpuKernel):
    def __init__(self, transport: HidingTransport) -> None:
        super().__init__()
        self._transport = transport

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        self._transport.kernels += 1
        return super().forward(*args)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        self._transport.kernels += 1
        return super().backward(*args)


def count_unhidden(
    degree: int,
    *,
    heads_degree: int = 1,
    masks: tuple[Mask, ...] = (),
    value_dim: int = 8,
    compiled: bool = False,
) -> tuple[list[str], list[str]]:
    """Return the kinds of the messages that no kernel hides, (forward, backward), of the member with most.

    Args:
        degree: members of the ring.
        heads_degree: ranks that share the heads of each.
        masks: of the pack's two sequences.
        value_dim: head size of values; keys have 8.
        compiled: attend as in a compiled graph.
    """
    layout = shard_layout((311, 402), degree * heads_degree, heads_degree, masks)

    def of_member(index: int) -> tuple[list[str], list[str]]:
        transport = HidingTransport()
        ring = Ring(layout, index, tuple(range(layout.degree)), transport)
        q, k, v = (
            torch.zeros(1, heads, ring.tokens, size, requires_grad=True)
            for heads, size in ((4, 8), (2, 8), (2, value_dim))
        )
        with mock.patch.object(ring_passes, "select_kernel", lambda device_type, dtype: _CountedKernel(transport)):
            if compiled:
                out = attend_compiled(q, k, v, ring, AttentionSpec(1.0), None)
            else:
                out = attention(q, k, v, ring=ring)
            forward = list(transport.unhidden)
            torch.autograd.backward(out.sum())
        return forward, transport.unhidden[len(forward) :]

    return max(map(of_member, range(layout.degree)), key=lambda found: sum(map(len, found)))


def measure() -> dict[str, Any]:
    """Return everything that is counted, as it is kept in a file."""
    commit = subprocess.run(("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False)
    packs = {}
    for name, (lengths, degree) in PACKS.items():
        packs[name] = {pass_: asdict(counts) for pass_, counts in count_pack(lengths, degree).items()}
    return {"commit": commit.stdout.strip(), "torch": torch.__version__, "packs": packs}


def main() -> None:
    """Print one table, before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the counts here, to be a later --before")
    parser.add_argument("--before", type=Path, default=BEFORE, help="counts to compare with (default %(default)s)")
    options = parser.parse_args()
    after = measure()
    if options.json:
        options.json.write_text(json.dumps(after, indent=1) + "\n")
    before = json.loads(options.before.read_text())
    print(f"before: {before['commit']}; per layer, bf16, the member with most of each; ratio = after / before")
    print(f"{'':<36} {'pass':<9}{'':<14} {'before':>9} {'after':>9} {'ratio':>6}  {'after, per hop':>14}")
    for name, (_, degree) in PACKS.items():
        old, new = before["packs"][name], after["packs"][name]
        for pass_ in PASSES:
            print_pass(name, pass_, old.get(pass_, old["backward"]), new[pass_], hops=degree - 1)
    print()
    print(f"{'u x r':<24} {'messages':>9} {'predicted':>10} {'MiB sent':>10} {'predicted':>10}")
    for window, (u, r) in product((None, WINDOW), SHARED):
        counted, predicted = count_sent(u, r, window), predicted_sent(u, r, window)
        sent = f"{counted.sent_bytes / MIB:10.1f} {predicted.sent_bytes / MIB:10.1f}"
        group = f"{u} x {r}" + (f", window of {window}" if window else "")
        print(f"{group:<24} {counted.messages:9} {predicted.messages:10} {sent}")
    print()
    print(f"{'unhidden messages':<32} {'degree':>6}  {'forward':<16} backward")
    for path, arguments in PATHS.items():
        for degree in range(2, 9):
            in_forward, in_backward = (", ".join(kinds) or "0" for kinds in count_unhidden(degree, **arguments))
            print(f"{path:<32} {degree:6}  {in_forward:<16} {in_backward}")


def print_pass(name: str, pass_: str, before: dict[str, int], after: dict[str, int], *, hops: int) -> None:
    """Print one pass of one pack, a line for each quantity."""
    for quantity in after:
        old, new = before[quantity], after[quantity]
        if not old and not new:
            continue
        unit, per = (" MiB", MIB) if quantity.endswith("_bytes") else ("", 1)
        label = quantity.removesuffix("_bytes") + unit
        ratio = f"{new / old:6.2f}" if old else "     -"
        print(f"{name:<36} {pass_:<9}{label:<14} {old / per:9.0f} {new / per:9.0f} {ratio}  {new / per / hops:14.1f}")


if __name__ == "__main__":
    main()
