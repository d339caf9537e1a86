"""Losses of MoE routers under a plan, equal to those of a single process that runs the same packs.

Megatron counts the tokens of each expert over a static context-parallel group, which has one rank under a plan. Here
they are counted over the micro-batch's group, without padding. For T tokens, top-k routing to E experts, and the score
p(x, e) of token x for expert e,

    loss = coefficient * E / (k T) * sum over e of tokens(e) * sum over x of p(x, e)

over the tokens of a pack (`aux_loss`) or of each sequence (`seq_aux_loss`). As with the per-token loss, it has the
weight of T token losses. Every member adds the part of its own tokens x. The z-loss is a sum over tokens.

A router does not receive the call's sequences, so a context variable holds them while its layer runs, also in a
recomputed forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import router as routers
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.transport import drive

_current: ContextVar[Any] = ContextVar("layer_sequences", default=None)
"""Sequences of the call in which a layer runs now: `model.RingSequences`."""


def hook_losses(model: Any) -> None:
    """Hook a model's routers to compute their losses over the packs of a plan."""
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            module.forward = partial(_within_call, module.forward)
        elif isinstance(module, routers.TopKRouter):
            module.apply_z_loss = partial(_z_loss, module, module.apply_z_loss)
            module._apply_aux_loss = partial(_loss_of_pack, module, module._apply_aux_loss)
            module._apply_seq_aux_loss = partial(_loss_of_sequences, module, module._apply_seq_aux_loss)


def _within_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    sequences = kwargs.get("packed_seq_params")
    token = _current.set(sequences if getattr(sequences, "owners", None) is not None else None)
    try:
        return original(*args, **kwargs)
    finally:
        _current.reset(token)


def _sequences() -> Any:
    """Return the sequences of the current call; None outside of planned micro-batches."""
    sequences = _current.get()
    if sequences is None and torch._C._current_graph_task_id() != -1:
        raise RunError(
            "a router of experts with a loss is computed again without the rest of its layer, where its micro-batch is "
            "not known; drop moe from --recompute-modules"
        )
    return sequences


def _loss_of_pack(
    router: Any, original: Callable[..., Tensor], probs: Tensor, scores: Tensor, routing_map: Tensor, **kwargs: Any
) -> Tensor:
    """Replace `TopKRouter._apply_aux_loss`: the balancing loss of the pack."""
    coefficient, sequences = router.get_aux_loss_coeff("aux_loss"), _sequences()
    if sequences is None or not coefficient:
        return original(probs, scores, routing_map, **kwargs)
    owners = (_own(router, sequences.owners) == len(sequences.lengths)).long()
    loss, mean = _balancing_loss(router, coefficient, scores, routing_map, owners, [sum(sequences.lengths)], sequences)
    _record(router, "load_balancing_loss", mean * len(sequences.lengths))
    return _attached(probs, loss)


def _loss_of_sequences(
    router: Any,
    original: Callable[..., Tensor],
    probs: Tensor,
    scores: Tensor,
    routing_map: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Replace `TopKRouter._apply_seq_aux_loss`: the balancing losses of the sequences."""
    coefficient, sequences = router.get_aux_loss_coeff("seq_aux_loss"), _sequences()
    if sequences is None or not coefficient:
        return original(probs, scores, routing_map, *args, **kwargs)
    owners = _own(router, sequences.owners)
    loss, mean = _balancing_loss(router, coefficient, scores, routing_map, owners, sequences.lengths, sequences)
    _record(router, "seq_load_balancing_loss", mean)
    return _attached(probs, loss)


def _z_loss(router: Any, original: Callable[..., Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace `TopKRouter.apply_z_loss`, which would count padding."""
    coefficient = router.config.moe_z_loss_coeff
    if coefficient is None or not (router.training and torch.is_grad_enabled()):
        return original(logits, *args, **kwargs)
    sequences = _sequences()
    if sequences is None:
        return original(logits, *args, **kwargs)
    is_planned = _own(router, sequences.owners) < len(sequences.lengths)
    total = (torch.logsumexp(logits, dim=-1).square() * is_planned).sum()
    pack = max(sum(sequences.lengths), 1)  # an idle row has no token
    _record(router, "z_loss", total.detach() * len(sequences.lengths) / pack)
    return _attached(logits, coefficient * total)


def _balancing_loss(
    router: Any,
    coefficient: float,
    scores: Tensor,
    routing_map: Tensor,
    owners: Tensor,
    lengths: Sequence[int],
    sequences: Any,
) -> tuple[Tensor, Tensor]:
    """Return this process's part of (losses weighted by their tokens, sum of losses without coefficient for the log).

    Args:
        scores, routing_map: [tokens, experts].
        owners: [tokens], index in `lengths` of each token; len(lengths) for padding.
        lengths: number of tokens over which each loss is computed.
    """
    experts = scores.shape[1]
    counts = scores.new_zeros(len(lengths) + 1, experts, dtype=torch.float32)
    # The last row counts padding, and is dropped.
    counts = counts.index_add_(0, owners, routing_map.to(counts))[:-1]
    if router.config.sequence_parallel:
        dist.all_reduce(counts, group=parallel_state.get_tensor_model_parallel_group())
    counts = drive(sequences.ring.summed(counts.contiguous()))
    tokens = torch.tensor(lengths, dtype=scores.dtype, device="cpu").clamp_min(1).to(scores.device).unsqueeze(1)
    weights = torch.cat((experts * counts / (router.topk * tokens), scores.new_zeros(1, experts)))
    by_token = torch.cat((weights[:-1] / tokens, weights[-1:]))
    loss: Tensor = coefficient * (scores * weights[owners]).sum()
    return loss, (scores.detach() * by_token[owners]).sum()


def _own(router: Any, owners: Tensor) -> Tensor:
    """Return this process's slice of a per-token tensor under sequence parallelism, else all of it."""
    if not router.config.sequence_parallel:
        return owners
    share = parallel_state.get_tensor_model_parallel_rank()
    own: Tensor = owners.chunk(parallel_state.get_tensor_model_parallel_world_size())[share]
    return own


def _attached(activation: Tensor, loss: Tensor) -> Tensor:
    """Attach a loss to an activation, so that its backward also runs the loss's, in the scale of the main loss."""
    attached: Tensor = routers.MoEAuxLossAutoScaler.apply(activation, loss)
    return attached


def _record(router: Any, name: str, value: Tensor) -> None:
    """Record a sum over sequences in Megatron's log, which divides it by micro-batches and ranks."""
    if not router.config.sequence_parallel:  # each process of a replica has all of its tokens
        value = value / parallel_state.get_tensor_model_parallel_world_size()
    tracker = getattr(routers, "get_moe_metrics_tracker", None)
    record = routers.save_to_aux_losses_tracker if tracker is None else tracker().record
    group = parallel_state.get_tensor_model_parallel_group()
    layers = router.config.num_layers
    # MTP layers come last in the log; newer versions number them from 1 again.
    number = router.layer_number + (layers if getattr(router, "is_mtp_layer", False) else 0)
    record(name, value, number, layers + (router.config.mtp_num_layers or 0), reduce_group=group)
