"""The items that a rank holds, at each moment of a step that may need the most."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fcp_cli.cost.profile import Memory

RESERVE_FRACTION = 0.08
"""The share of a device's memory that is left to allocator, back ends, and whatever no figure counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryItem:
    """One thing in memory.

    Attributes:
        fixed_bytes: the fixed bytes that it takes whatever the tokens are.
        bytes_per_token: the bytes per token of the rank.
        most_bytes: limit of its bytes for tokens, for work done in chunks of limited size.
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
        """Return from how many tokens on it grows no more."""
        return self.most_bytes / self.bytes_per_token if self.is_limited else math.inf

    def line(self, tokens: float) -> tuple[float, float]:
        """Return the (fixed bytes, bytes per token) that hold for so many tokens and more."""
        if tokens < self.end_tokens:
            return self.fixed_bytes, self.bytes_per_token
        return self.fixed_bytes + self.most_bytes, 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment of a step, with everything that is in memory then."""

    name: str
    items: tuple[MemoryItem, ...]

    @property
    def fixed_bytes(self) -> float:
        """Return the bytes independent of the tokens, including items at their limit."""
        return sum(item.fixed_bytes + (item.most_bytes if item.is_limited else 0.0) for item in self.items)

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes per token that grow without limit."""
        return sum(item.bytes_per_token for item in self.items if not item.is_limited)

    def bytes_at(self, tokens: float) -> float:
        return sum(item.bytes_at(tokens) for item in self.items)

    def line(self, tokens: float) -> tuple[float, float]:
        """Return the (fixed bytes, bytes per token) around so many tokens."""
        lines = [item.line(tokens) for item in self.items]
        return sum(fixed for fixed, _ in lines), sum(slope for _, slope in lines)

    def limit(self, capacity_bytes: float) -> float:
        """Return the most tokens that stay within the capacity: negative where nothing fits, infinite for any."""
        # Items stop growing one after the other; the limit lies where the line of a stretch meets the capacity.
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
    """Memory of a rank's fullest device; a step needs the maximum over its moments.

    Attributes:
        moments: the moments of training.
        forward_moments: those of a forward-only pass, on top of the same model's state.
    """

    moments: tuple[Moment, ...]
    forward_moments: tuple[Moment, ...] = ()

    def in_forward(self) -> RankMemory:
        """Return its memory if only forward passes run."""
        return RankMemory(moments=self.forward_moments, forward_moments=self.forward_moments)

    def without(self, *names: str) -> RankMemory:
        """Return it without items of these names."""

        def left(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
            return tuple(
                Moment(name=one.name, items=tuple(item for item in one.items if item.name not in names))
                for one in moments
            )

        return RankMemory(moments=left(self.moments), forward_moments=left(self.forward_moments))

    @property
    def kept_bytes_per_token(self) -> float:
        """Bytes per token that layers keep for their backward, at the moment that has most of them."""
        names = ("activations", "layer inputs")
        return max(item.bytes_per_token for one in self.moments for item in one.items if item.name in names)

    def peak(self, tokens: float) -> Moment:
        """Return the moment of a step with the most bytes, if the rank's largest micro-batch has so many tokens."""
        return max(self.moments, key=lambda moment: moment.bytes_at(tokens))

    def total_bytes(self, tokens: float) -> float:
        """Return the peak of a step whose largest micro-batch gives the rank so many tokens."""
        return self.peak(tokens).bytes_at(tokens)

    def items(self, tokens: float) -> dict[str, float]:
        """Return the bytes of each item at the peak, largest first; they add up to `total_bytes`."""
        found: dict[str, float] = {}
        for item in self.peak(tokens).items:
            found[item.name] = found.get(item.name, 0.0) + item.bytes_at(tokens)
        return {name: size for name, size in sorted(found.items(), key=lambda pair: -pair[1]) if size}

    def binding(self, capacity_bytes: float) -> Moment:
        """Return the moment that limits the tokens on a device with so many bytes for the job."""
        # Where not even the model fits, it is the moment that needs the most without tokens.
        return min(self.moments, key=lambda one: (max(0.0, one.limit(capacity_bytes)), -one.bytes_at(0)))

    def tokens(self, capacity_bytes: float) -> int:
        """Return the most tokens that a micro-batch may give the rank; 0 where not even the model fits."""
        return max(0, math.floor(self.binding(capacity_bytes).limit(capacity_bytes)))

    def as_profile_memory(self, capacity_bytes: float) -> Memory:
        """Return the memory block of a cost profile: the line of the moment that limits the tokens, where it does."""
        moment = self.binding(capacity_bytes)
        fixed, slope = moment.line(self.tokens(capacity_bytes))
        if not slope:  # a moment without tokens has no room: let tokens have none either
            slope = max(one.line(0)[1] for one in self.moments)
        return Memory(bytes_per_token=slope, model_state_bytes=fixed, capacity_bytes=capacity_bytes)
