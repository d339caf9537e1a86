"""Attention kernels of NVIDIA devices: their order on each architecture, and a measured table of them.

The order is for calls that no table covers. A kernel that lacks a feature of a call (a head size, a type, a window)
passes it on to the next of its order; FlashAttention 2, which ships with PyTorch, comes last or first and takes all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from fcp_cli.cost.kernel_names import KERNELS, KernelName
from fcp_cli.validation import Count, NonEmptyText, NonNegative, Positive

# A new shape costs cuDNN the construction of a graph, about 42 ms each way (pytorch#191576). Against FlashAttention 2
# on an H100 (3.7 ms forward at 8,192 tokens, 1.05 ms at 4,096; cuDNN 1.7 times as quick), 36 layers repay that from
# about 6,000 tokens on.
LEAST_UNMEASURED_TOKENS: Final = 8192


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
        major: its major CUDA compute capability.
        rocm: it is an AMD device, whose order does not depend on `major`.
    """
    return _ROCM if rocm else _ORDERS.get(major, _OTHERS)


Mask: TypeAlias = Literal["causal", "full"]
Pack: TypeAlias = Literal["single", "equal", "mixed"]
_LEAST_CLASS, _MOST_CLASS = 256, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeClass:
    """Class of attention calls that are expected to favour the same kernel.

    Attributes:
        mask: causal within sequences, or every key.
        pack: one sequence, several of one length, or of several lengths.
        tokens: mean queries of a sequence, as the nearest power of two.
    """

    mask: Mask
    pack: Pack
    tokens: int


def shape_class(q_lengths: Sequence[int], *, causal: bool) -> ShapeClass:
    """Return the class of a call, from figures that the host knows."""
    count, total = len(q_lengths), sum(q_lengths)
    pack: Pack = "single" if count == 1 else "equal" if len(set(q_lengths)) == 1 else "mixed"
    return ShapeClass(mask="causal" if causal else "full", pack=pack, tokens=_nearest_power(total / count))


def _nearest_power(tokens: float) -> int:
    power = _LEAST_CLASS
    while power < _MOST_CLASS and tokens * tokens > 2 * power * power:  # beyond the geometric middle
        power *= 2
    return power


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTiming:
    """Seconds of a kernel on a shape class.

    Attributes:
        forward_seconds, backward_seconds: the seconds of a call whose shape was called before.
        first_seconds: extra seconds of a shape's first calls, forward and backward together.
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
        heads: query heads, key/value heads and their size.
        layers: how many layers the model has; each repeats a call's shape, so that a shape's first seconds are shared
            by so many.
        kernel: the kernel that ran while the profile's coefficients were measured; None if a mix.
        timings: one per kernel and class; a kernel that refused a class has none there.
    """

    device: NonEmptyText
    release: NonEmptyText
    heads: Annotated[tuple[Count, ...], Meta(min_length=3, max_length=3)]
    layers: Count = 1
    kernel: KernelName | None = None
    timings: tuple[KernelTiming, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the block in its written form."""
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
        """Return the seconds of a call forward and backward, with its share of the first call's."""
        return timing.forward_seconds + timing.backward_seconds + timing.first_seconds / self.layers

    def order(self, shape: ShapeClass) -> tuple[KernelName, ...]:
        """Return the kernels measured on the nearest class, quickest first; empty if none has its mask."""
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
        """Return the number of classes that each kernel is the quickest of, most classes first."""
        firsts = [self.order(one)[0] for one in self.classes()]
        return dict(sorted(((name, firsts.count(name)) for name in KERNELS if name in firsts), key=lambda one: -one[1]))

    def ratio(self, runs: KernelName, assumed: KernelName) -> float | None:
        """Return how many times as long `runs` takes as `assumed`, over the classes of both; None if none has both."""
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
        """Return the class of the same mask, then pack, whose tokens are nearest by their ratio."""
        with_mask = [one for one in self.classes() if one.mask == shape.mask]
        candidates = [one for one in with_mask if one.pack == shape.pack] or with_mask
        if not candidates:
            return None
        best = min(candidates, key=lambda one: max(one.tokens / shape.tokens, shape.tokens / one.tokens))
        return best.mask, best.pack, best.tokens
