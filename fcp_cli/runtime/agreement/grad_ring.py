"""Data type in which gradients of keys and values travel around rings; the same on all ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from fcp_cli.errors import RunError

if TYPE_CHECKING:
    import torch

    from fcp_cli.runtime.communication.world import World

VARIABLE = "FCP_GRAD_RING_DTYPE"

GradRingDtype: TypeAlias = Literal["fp32", "bf16"]
"""How gradients of 16-bit keys and values travel: summed in fp32, or rounded to the type of the keys at every hop,
which is half the bytes. Gradients of fp32 and fp64 keys travel in their own type either way."""


def agreed_grad_dtype(world: World, device: torch.device, given: GradRingDtype | None = None) -> GradRingDtype:
    """Return the argument, else FCP_GRAD_RING_DTYPE, else fp32. Collective: every rank calls it.

    Args:
        world: all processes.
        device: device of the collectives' tensors.
        given: value from the script; the same on every rank.
    """
    from fcp_cli.runtime.communication.world import gather_words

    choices = get_args(GradRingDtype)
    wanted = given or os.environ.get(VARIABLE) or choices[0]
    own = choices.index(wanted) if wanted in choices else len(choices)
    per_rank = [choice for (choice,) in gather_words(world, (own,), device)]
    if wanted not in choices:
        raise RunError(f"{VARIABLE} is {wanted!r}; it must be one of {', '.join(choices)}")
    for rank, choice in enumerate(per_rank):
        if choice != per_rank[0]:
            raise RunError(
                f"gradients travel in {choices[per_rank[0]]} on rank 0, but rank {rank} has another {VARIABLE}; set it "
                "alike on all nodes"
            )
    agreed: GradRingDtype = choices[per_rank[0]]
    return agreed
