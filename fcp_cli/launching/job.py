"""What environment and preflight need to know about a launch: flat, so that a test writes one in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import PlanMetadata

_BFLOAT16_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A launch, as far as checks and variables depend on it.

    Attributes:
        plan: as typed, for messages.
        stack: what the ranks run on: `cpu`, `cuda`, `npu`, or `unknown` on a head node that cannot tell.
        node_rank: this machine's number; None where it is not one of the nodes (a dry run).
        model: that is trained; None where only the user's script knows.
        arguments: of the user's own script; empty for the bundled trainer.
        is_bundled: whether the bundled trainer runs.
        launcher: what starts the ranks of a node.
        needs_torch: whether the ranks run torch; MindSpore's own scripts do not.
        hosts: names of the nodes in order, where somebody listed them.
    """

    plan: Path
    metadata: PlanMetadata
    stack: str
    num_nodes: int
    processes_per_node: int
    node_rank: int | None = None
    master_addr: str = ""
    master_port: int = 29500
    model: str | None = None
    arguments: tuple[str, ...] = ()
    is_bundled: bool = True
    launcher: str = "torchrun"
    needs_torch: bool = True
    hosts: tuple[str, ...] = ()

    @property
    def profile(self) -> CostProfile | None:
        """The plan's cost profile; None where it has none that can be read."""
        return _profile(self.metadata.cost_profile)

    @property
    def hop_bytes(self) -> int | None:
        """Largest message of a ring: keys and values that a device of a rank holds of its token budget, one layer,
        bfloat16; None: unknown.
        """
        name = self.model or (self.profile.model if self.profile is not None else None)
        with suppress(ProfileError):
            if name is not None:
                spec = load_model(name)
                heads = max(1, spec.num_kv_heads // self.metadata.tensor_parallel)
                return 2 * heads * spec.head_dim * _BFLOAT16_BYTES * self.metadata.tokens_per_rank
        return None


@cache
def _profile(text: str) -> CostProfile | None:
    with suppress(ProfileError):
        return parse_cost_profile(text, name="the plan's cost profile")
    return None


def argument(words: Sequence[str], flag: str) -> str | None:
    """The value of `--flag VALUE` or `--flag=VALUE` among a script's arguments; the last one counts."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
