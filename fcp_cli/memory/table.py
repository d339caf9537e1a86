"""The items that a rank holds, at each moment of a step that may need the most."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fcp_cli.cost.profile import Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One thing in memory: what it takes whatever the tokens are, and what it takes for each token of the rank."""

    name: str
    fixed_bytes: float = 0.0
    bytes_per_token: float = 0.0

    def bytes_at(self, tokens: float) -> float:
        return self.fixed_bytes + self.bytes_per_token * tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment of a step, with everything that is in memory then."""

    name: str
    items: tuple[Item, ...]

    @property
    def fixed_bytes(self) -> float:
        return sum(item.fixed_bytes for item in self.items)

    @property
    def bytes_per_token(self) -> float:
        return sum(item.bytes_per_token for item in self.items)

    def bytes_at(self, tokens: float) -> float:
        return self.fixed_bytes + self.bytes_per_token * tokens

    def tokens(self, capacity_bytes: float) -> int | None:
        """Return the most tokens that leave it within the capacity, negative where nothing fits; None: any number."""
        room = capacity_bytes - self.fixed_bytes
        if not self.bytes_per_token:
            return None if room >= 0 else -1
        return math.floor(room / self.bytes_per_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What the fullest device of a rank holds; a step needs the most that any of its moments does."""

    moments: tuple[Moment, ...]

    def peak(self, tokens: float) -> Moment:
        """Return the moment that needs the most with so many tokens in the largest micro-batch of the rank."""
        return max(self.moments, key=lambda moment: moment.bytes_at(tokens))

    def total_bytes(self, tokens: float) -> float:
        """Return the peak of a step whose largest micro-batch gives the rank so many tokens."""
        return self.peak(tokens).bytes_at(tokens)

    def items(self, tokens: float) -> dict[str, float]:
        """Return the bytes of each item at the peak, largest first; they add up to `total_bytes`."""
        found = {item.name: item.bytes_at(tokens) for item in self.peak(tokens).items}
        return {name: size for name, size in sorted(found.items(), key=lambda pair: -pair[1]) if size}

    def binding(self, capacity_bytes: float) -> Moment:
        """Return the moment that limits the tokens on a device with so many bytes for the job."""
        limits = [(moment.tokens(capacity_bytes), moment) for moment in self.moments]
        return min(limits, key=lambda limit: math.inf if limit[0] is None else limit[0])[1]

    def tokens(self, capacity_bytes: float) -> int:
        """Return the most tokens that a micro-batch may give the rank; 0 where not even the model fits."""
        return max(0, self.binding(capacity_bytes).tokens(capacity_bytes) or 0)

    def as_profile_memory(self, capacity_bytes: float) -> Memory:
        """Return the memory block of a cost profile: the line of the moment that limits the tokens."""
        moment = self.binding(capacity_bytes)
        return Memory(
            bytes_per_token=moment.bytes_per_token or max(one.bytes_per_token for one in self.moments),
            model_state_bytes=moment.fixed_bytes,
            capacity_bytes=capacity_bytes,
        )
