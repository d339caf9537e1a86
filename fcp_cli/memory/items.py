"""Memory items of a rank at each moment of a step that may be its peak."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fcp_cli.cost.profile import Memory
from fcp_cli.cost.recipe import Recipe

RESERVE_FRACTION = 0.08
"""The share of a device's memory that is left to allocator, back ends, and whatever no figure counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryItem:
    """One kind of allocation.

    Attributes:
        fixed_bytes: bytes independent of tokens.
        bytes_per_token: bytes per token of the rank.
        most_bytes: limit of the token-dependent bytes, for work in chunks of bounded size.
    """

    name: str
    fixed_bytes: float = 0.0
    bytes_per_token: float = 0.0
    most_bytes: float = math.inf

    def bytes_at(self, tokens: float) -> float:
        return self.fixed_bytes + min(self.bytes_per_token * tokens, self.most_bytes)

    @property
    def is_limited(self) -> bool:
        return bool(self.bytes_per_token) and self.most_bytes < math.inf

    @property
    def end_tokens(self) -> float:
        """Number of tokens at which the item stops growing."""
        return self.most_bytes / self.bytes_per_token if self.is_limited else math.inf

    def line(self, tokens: float) -> tuple[float, float]:
        """Return the (fixed bytes, bytes per token) of the linear segment that begins at or contains `tokens`."""
        if tokens < self.end_tokens:
            return self.fixed_bytes, self.bytes_per_token
        return self.fixed_bytes + self.most_bytes, 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment of a step with all items in memory at that time."""

    name: str
    items: tuple[MemoryItem, ...]

    @property
    def fixed_bytes(self) -> float:
        """Bytes independent of tokens, counting limited items at their limit."""
        return sum(item.fixed_bytes + (item.most_bytes if item.is_limited else 0.0) for item in self.items)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the items without a limit."""
        return sum(item.bytes_per_token for item in self.items if not item.is_limited)

    def bytes_at(self, tokens: float) -> float:
        return sum(item.bytes_at(tokens) for item in self.items)

    def line(self, tokens: float) -> tuple[float, float]:
        """Return the (fixed bytes, bytes per token) of the linear segment at `tokens`."""
        lines = [item.line(tokens) for item in self.items]
        return sum(fixed for fixed, _ in lines), sum(slope for _, slope in lines)

    def limit(self, capacity_bytes: float) -> float:
        """Return the most tokens within the capacity; negative if nothing fits, infinite if any number does."""
        # Piecewise linear: the limit is where a segment's line reaches the capacity.
        ends = sorted({item.end_tokens for item in self.items} - {math.inf})
        found = math.inf
        for start, end in zip((0.0, *ends), (*ends, math.inf), strict=True):
            fixed, slope = self.line(start)
            room = capacity_bytes - fixed
            found = room / slope if slope else (math.inf if room >= 0 else -1.0)
            if found < end:
                return found
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory of a rank's fullest device; the peak of a step is the maximum over its moments.

    Attributes:
        moments: moments of a training step.
        forward_moments: moments of a forward-only pass with the same model state.
    """

    moments: tuple[Moment, ...]
    forward_moments: tuple[Moment, ...] = ()

    def in_forward(self) -> RankMemory:
        """Return the memory of forward-only passes."""
        return RankMemory(moments=self.forward_moments, forward_moments=self.forward_moments)

    def without(self, *names: str) -> RankMemory:
        """Return the memory without the named items."""

        def left(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
            return tuple(
                Moment(name=one.name, items=tuple(item for item in one.items if item.name not in names))
                for one in moments
            )

        return RankMemory(moments=left(self.moments), forward_moments=left(self.forward_moments))

    @property
    def kept_bytes_per_token(self) -> float:
        """Most bytes per token that layers keep for their backward, over all moments."""
        names = ("activations", "layer inputs")
        return max(item.bytes_per_token for one in self.moments for item in one.items if item.name in names)

    def peak(self, tokens: float) -> Moment:
        """Return the peak moment of a step whose largest micro-batch has `tokens` tokens on the rank."""
        return max(self.moments, key=lambda moment: moment.bytes_at(tokens))

    def total_bytes(self, tokens: float) -> float:
        """Return the peak bytes of a step whose largest micro-batch has `tokens` tokens on the rank."""
        return self.peak(tokens).bytes_at(tokens)

    def items(self, tokens: float) -> dict[str, float]:
        """Return the bytes of each item at the peak, largest first; they sum to `total_bytes`."""
        found: dict[str, float] = {}
        for item in self.peak(tokens).items:
            found[item.name] = found.get(item.name, 0.0) + item.bytes_at(tokens)
        return {name: size for name, size in sorted(found.items(), key=lambda pair: -pair[1]) if size}

    def binding(self, capacity_bytes: float) -> Moment:
        """Return the moment that limits the tokens on a device with `capacity_bytes` for the job."""
        # If not even the model fits, all limits are 0, and the moment with most fixed bytes binds.
        return min(self.moments, key=lambda one: (max(0.0, one.limit(capacity_bytes)), -one.bytes_at(0)))

    def tokens(self, capacity_bytes: float) -> int:
        """Return the token budget of the rank, 0 if not even the model fits."""
        return max(0, math.floor(self.binding(capacity_bytes).limit(capacity_bytes)))

    def as_profile_memory(self, capacity_bytes: float) -> Memory:
        """Return the memory block of a cost profile: the binding moment's linear segment at the token budget."""
        moment = self.binding(capacity_bytes)
        fixed, slope = moment.line(self.tokens(capacity_bytes))
        if not slope:  # the fixed bytes alone exceed the capacity: any slope yields a budget of 0
            slope = max(one.line(0)[1] for one in self.moments)
        return Memory(bytes_per_token=slope, model_state_bytes=fixed, capacity_bytes=capacity_bytes)


# Element sizes of the tensors of a recipe.


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes per element.

    Attributes:
        weight: unsharded weights between steps.
        master: master weights of the optimizer; 0 if it updates the weights in place.
        moments: both moments of Adam together.
        gathered: sharded weights while they are gathered for compute.
        gradient: accumulated gradients.
        activation: outputs of matrix products and attention.
        residual: residual stream, which autocast leaves in the type of the weights.
        loss: logits in the loss.
        copy: weight copies that autocast makes and autograd keeps; 0 without autocast.
    """

    weight: int
    master: int
    moments: int
    gathered: int
    gradient: int
    activation: int
    residual: int
    loss: int = 4
    copy: int = 0


_PRECISIONS = {
    "bf16": Precision(weight=2, master=4, moments=8, gathered=2, gradient=4, activation=2, residual=2),
    "amp": Precision(weight=4, master=0, moments=8, gathered=4, gradient=4, activation=2, residual=4, copy=2),
    "fp32": Precision(weight=4, master=0, moments=8, gathered=4, gradient=4, activation=4, residual=4),
    "fp64": Precision(weight=8, master=0, moments=16, gathered=8, gradient=8, activation=8, residual=8, loss=8),
}


def precision_of(recipe: Recipe) -> Precision:
    """Return the element sizes of a recipe."""
    return _PRECISIONS[recipe.precision]
