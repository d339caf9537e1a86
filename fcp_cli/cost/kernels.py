"""Attention kernels of NVIDIA devices: default order by architecture, and measured timings.

The default order applies to calls that no table covers. A call with a feature that a kernel lacks (a head size, a type,
a window) falls back to the next kernel; FlashAttention 2, which ships with PyTorch, supports all calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from fcp_cli.cost.recipe import KERNELS, KernelName
from fcp_cli.util.validation import Count, NonEmptyText, NonNegative, Positive

# cuDNN builds a graph for each new shape, thread and direction: 42 ms of the host (pytorch#191576). Recomputed layers
# run forward in autograd's thread, too: three graphs. Members of a ring build at different hops, and all wait: 1.2 to
# 1.6 times the builds of one (benchmarks/kernel_shapes.py). So a shape seen once pays from
#     layers x seconds saved per pair x tokens^2 / 2 = 3 x 1.5 x 0.042 s
# on: 10,300 tokens for 36 layers of 9.9e-11 s, by which cuDNN beats FlashAttention 2 in two forwards and a backward of
# 32 heads of 128 (h100-8x8.yaml: 0.55 and 0.52 instead of 0.345 and 0.29 of 989 TFLOP/s).
LEAST_UNMEASURED_TOKENS: Final = 11_000
# If lengths share graphs, only joining the results of a split pack must pay: 0.2 ms of a layer at 16k tokens (3.35
# TB/s), which is saved from 2,300 tokens on; rounded up, since no such graph was timed.
LEAST_TOKENS_OF_SHARED_GRAPHS: Final = 4_096
_GRAPHS, _TIMED_GRAPHS = 3, 2  # of a shape of recomputed layers; of a timing, whose thread runs forward and backward


def pays_for_graphs(queries: int, keys: int, *, causal: bool, tokens: float) -> bool:
    """Return whether a sequence has at least as many query-key pairs as a causal one of `tokens`."""
    return queries * keys * (1 if causal else 2) >= tokens**2


DefaultOrder: TypeAlias = tuple[tuple[KernelName, ...], str]
"""Kernels of an architecture, quickest first, and where the order comes from."""

_ORDERS: Final[dict[int, DefaultOrder]] = {  # by the major CUDA compute capability
    9: (("cudnn", "fa3", "fa4", "fa2"), "Hopper: cuDNN 1.7 to 2.3 x FlashAttention 2 (transformers#48163, #48324)"),
    10: (("cudnn", "fa4", "fa2"), "B200: cuDNN 1 to 2 x FlashAttention 4 (sglang#33655, pytorch#191576)"),
}
_OTHERS: Final[DefaultOrder] = (
    ("fa2", "cudnn"),
    "A100, L40S, RTX: cuDNN 0.82 to 1.0 x FlashAttention 2 (transformers#48163)",
)
_ROCM: Final[DefaultOrder] = ("fa2",), "ROCm: PyTorch's flash attention alone"


def default_order(major: int, *, rocm: bool = False) -> DefaultOrder:
    """Return the default order of attention kernels on a device.

    Args:
        major: major CUDA compute capability of the device.
        rocm: whether it is an AMD device, whose order does not depend on `major`.
    """
    return _ROCM if rocm else _ORDERS.get(major, _OTHERS)


Mask: TypeAlias = Literal["causal", "full"]
Pack: TypeAlias = Literal["single", "equal", "mixed"]
_LEAST_CLASS, _MOST_CLASS = 256, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeClass:
    """Class of attention calls that are expected to favour the same kernel.

    Attributes:
        mask: `causal` within sequences, or `full`.
        pack: one sequence (`single`), several of `equal` length, or of `mixed` lengths.
        tokens: mean query length, rounded to the geometrically nearest power of two.
    """

    mask: Mask
    pack: Pack
    tokens: int


def shape_class(q_lengths: Sequence[int], *, causal: bool) -> ShapeClass:
    """Return the class of a call from its query lengths, without a device synchronization."""
    count, total = len(q_lengths), sum(q_lengths)
    pack: Pack = "single" if count == 1 else "equal" if len(set(q_lengths)) == 1 else "mixed"
    return ShapeClass(mask="causal" if causal else "full", pack=pack, tokens=_nearest_power(total / count))


def _nearest_power(tokens: float) -> int:
    power = _LEAST_CLASS
    while power < _MOST_CLASS and tokens * tokens > 2 * power * power:  # above the geometric mean of both powers
        power *= 2
    return power


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTiming:
    """Measured seconds of a kernel on a shape class.

    Attributes:
        forward_seconds, backward_seconds: seconds of a warmed-up call.
        first_seconds: extra seconds of the first calls of a shape, forward and backward together, after a similar one.
    """

    kernel: KernelName
    mask: Mask
    pack: Pack
    tokens: Count
    forward_seconds: Positive
    backward_seconds: Positive
    first_seconds: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTable:
    """Measured kernels of a device: the block `attention_kernels` of a cost profile.

    Attributes:
        device, release: name of the device, version of PyTorch.
        heads: query heads, key/value heads, head size.
        layers: layers of the model, over which the first seconds of a shape are amortized.
        kernel: kernel that the profile's coefficients were measured with, or None if mixed.
        timings: one per kernel and class, missing if the kernel does not support the class.
    """

    device: NonEmptyText
    release: NonEmptyText
    heads: Annotated[tuple[Count, ...], Meta(min_length=3, max_length=3)]
    layers: Count = 1
    kernel: KernelName | None = None
    timings: tuple[KernelTiming, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the block as YAML values."""
        block: dict[str, Any] = {
            "device": self.device,
            "release": self.release,
            "heads": list(self.heads),
            "layers": self.layers,
        }
        if self.kernel is not None:
            block["kernel"] = self.kernel
        return {**block, "timings": [asdict(timing) for timing in self.timings]}

    def seconds(self, timing: KernelTiming) -> float:
        """Return the forward and backward seconds of a call, with its share of the first seconds of all threads."""
        first = timing.first_seconds * _GRAPHS / _TIMED_GRAPHS
        return timing.forward_seconds + timing.backward_seconds + first / self.layers

    def order(self, shape: ShapeClass) -> tuple[KernelName, ...]:
        """Return the kernels measured on the nearest class, fastest first; empty if no class has the mask."""
        nearest = self._nearest(shape)
        if nearest is None:
            return ()
        there = [timing for timing in self.timings if (timing.mask, timing.pack, timing.tokens) == nearest]
        return tuple(timing.kernel for timing in sorted(there, key=self.seconds))

    def classes(self) -> list[ShapeClass]:
        """Return the measured classes, in the order of the table."""
        found = dict.fromkeys((timing.mask, timing.pack, timing.tokens) for timing in self.timings)
        return [ShapeClass(mask=mask, pack=pack, tokens=tokens) for mask, pack, tokens in found]

    def quickest(self) -> dict[KernelName, int]:
        """Return for each kernel the number of classes on which it is fastest, most classes first."""
        firsts = [self.order(one)[0] for one in self.classes()]
        return dict(sorted(((name, firsts.count(name)) for name in KERNELS if name in firsts), key=lambda one: -one[1]))

    def ratio(self, runs: KernelName, assumed: KernelName) -> float | None:
        """Return the time of kernel `runs` relative to `assumed` over their common classes, or None without any."""
        both = [
            (self._of(one, runs), self._of(one, assumed))
            for one in self.classes()
            if self._of(one, runs) and self._of(one, assumed)
        ]
        return sum(first for first, _ in both) / sum(second for _, second in both) if both else None

    def _of(self, shape: ShapeClass, kernel: KernelName) -> float:
        key = (kernel, shape.mask, shape.pack, shape.tokens)
        found = [one for one in self.timings if (one.kernel, one.mask, one.pack, one.tokens) == key]
        return found[0].forward_seconds + found[0].backward_seconds if found else 0.0

    def _nearest(self, shape: ShapeClass) -> tuple[Mask, Pack, int] | None:
        """Return the class with the nearest tokens (by ratio) among those of the same mask and, if any, same pack."""
        with_mask = [one for one in self.classes() if one.mask == shape.mask]
        candidates = [one for one in with_mask if one.pack == shape.pack] or with_mask
        if not candidates:
            return None
        best = min(candidates, key=lambda one: max(one.tokens / shape.tokens, shape.tokens / one.tokens))
        return best.mask, best.pack, best.tokens
