"""Memory of a plan's ranks, in a sentence."""

from __future__ import annotations

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.memory.fitting import sharing_ranks
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import Cut
from fcp_cli.memory.table import RankMemory
from fcp_cli.models.cluster import THIS_MACHINE
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata

_ITEMS_NAMED = 4


def ranks_are_hosts(metadata: PlanMetadata) -> bool:
    """Return whether ranks are CPU cores of one machine, which need no device memory for connections."""
    try:
        return parse_cost_profile(metadata.cost_profile, name="the plan's cost profile").cluster == THIS_MACHINE
    except ProfileError:
        return False


def planned_memory(metadata: PlanMetadata, peers: int) -> RankMemory | None:
    """Return the modelled memory of a rank; None if the plan names no model or recipe.

    Args:
        metadata: plan metadata.
        peers: maximum number of peers per rank.
    """
    if metadata.recipe is None:
        return None
    try:
        profile = parse_cost_profile(metadata.cost_profile, name="the plan's cost profile")
        spec = load_model(profile.model)
    except ProfileError:
        return None
    memory = rank_memory(
        spec,
        metadata.recipe,
        sync=metadata.sync,
        ranks=metadata.num_ranks,
        cut=Cut(
            tensor_parallel=metadata.tensor_parallel,
            pipeline_parallel=metadata.pipeline_parallel,
            expert_parallel=profile.expert_parallel,
        ),
        on_cpu=ranks_are_hosts(metadata),
        peers=peers,
        sharing=sharing_ranks(metadata.attention, metadata),
    )
    return memory if metadata.phase is None else memory.in_forward()


def memory_sentence(metadata: PlanMetadata, memory: RankMemory) -> str:
    """Describe the memory at the full token budget, in GB by use."""
    assert metadata.recipe is not None, "the memory model needs one"
    model = parse_cost_profile(metadata.cost_profile, name="the plan's cost profile").model
    tokens = metadata.tokens_per_rank
    items = [f"{name} {size / 1e9:.1f}" for name, size in memory.items(tokens).items()]
    named = ", ".join(items[:_ITEMS_NAMED]) + (" and more" if len(items) > _ITEMS_NAMED else "")
    takes = f"{memory.total_bytes(tokens) / 1e9:.1f} GB under {metadata.recipe.describe()}"
    return f"By the memory model of {model}, a rank at its full token budget takes {takes}: {named}."
