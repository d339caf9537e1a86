"""Computes gradients of a plan's steps on its ranks, and of the same sequences in a single process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.masks import CAUSAL, Mask
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.step import StepPlan
from fcp_cli.recipe import Reduce
from fcp_cli.runtime.data.loader import Fetch
from fcp_cli.runtime.loss.labels import IGNORED
from fcp_cli.runtime.loss.token_loss import next_token_labels, token_loss_sum
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.session import Session
from fcp_cli.verification.emulation import Meeting, ThreadTransport, ThreadWorld, run_ranks
from fcp_cli.verification.model import MaskedAttention, TinyConfig, TinyLanguageModel, ring_attend
from fcp_cli.verification.order import Operation
from fcp_cli.verification.recording import RecordingTransport, RecordingWorld

_RECEIVE_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Losses and gradients of replayed steps, from a rank or from a single process.

    Attributes:
        losses: [steps] loss of each step.
        gradients: [steps, parameters] flattened gradient of each step, summed over ranks.
        operations: operations issued by the rank, in order; () for a single process.
    """

    losses: FloatArray
    gradients: FloatArray
    operations: tuple[Operation, ...] = ()


def synthetic_tokens(plan: Path, vocab_size: int, seed: int = 0) -> Fetch:
    """Return a function that makes random tokens per manifest row, with the plan's lengths, equal on every rank."""
    lengths: dict[int, int] = {}
    for step in PlanReader(plan).steps():
        lengths.update(zip(step.sequences.tolist(), step.lengths.tolist(), strict=True))
    longest = max(lengths.values())

    def fetch(row: int) -> IntArray:
        return np.random.default_rng((seed, row)).integers(vocab_size, size=longest)[: lengths.get(row, longest)]

    return fetch


def tiny_config(plan: Path) -> TinyConfig:
    """Return model sizes whose heads are divisible by all Ulysses degrees of the plan."""
    shared = {int(u) for step in PlanReader(plan).steps() if step.heads_degree is not None for u in step.heads_degree}
    sizes = TinyConfig()
    heads = math.lcm(sizes.heads, *shared)
    fits = all(not sizes.kv_heads % u or not u % sizes.kv_heads for u in shared)
    head_dim = max(sizes.width // heads // 2 * 2, 2)  # rotary embeddings need an even size
    return TinyConfig(width=heads * head_dim, heads=heads, kv_heads=sizes.kv_heads if fits else 1)


def replay_rank(session: Session, config: TinyConfig, *, seed: int = 0) -> Replayed:
    """Replay this rank's part of all steps. Collective."""
    model = TinyLanguageModel(config, ring_attend, seed=seed)
    return gradients_on_rank(session, model, lambda mb: mb.loss(model(mb.input_ids, mb.position_ids, mb.ring)))


def gradients_on_rank(
    session: Session, model: nn.Module, loss_of: Callable[[LocalMicroBatch], Tensor], *, reduce: Reduce | None = None
) -> Replayed:
    """Return the loss and gradient of each step, without updating the model's weights. Collective.

    Args:
        session: session of the plan.
        model: model for `Session.steps`.
        loss_of: returns this rank's share of a micro-batch's loss (see `LocalMicroBatch.loss`).
        reduce: see `Session.steps`.
    """
    losses, gradients = [], []
    for step in session.steps(model, reduce=reduce):
        for microbatch in step:
            torch.autograd.backward(loss_of(microbatch))
        losses.append(step.reduced_loss())
        gradients.append(take_gradient(model))
    return Replayed(losses=np.array(losses), gradients=np.stack(gradients))


def thread_session(plan: Path, fetch: Fetch | None, meeting: Meeting, rank: int) -> Session:
    """Create a session for a rank of `run_ranks`."""
    return Session(
        plan=plan,
        metadata=PlanReader(plan).metadata,
        fetch=fetch,
        world=ThreadWorld(meeting, rank),
        transport=ThreadTransport(meeting.mailbox, rank, _RECEIVE_TIMEOUT_SECONDS),
        device=torch.device("cpu"),
        steps_ahead=0,  # no prefetch threads besides those of the ranks
    )


def replay_threads(plan: Path, config: TinyConfig, *, seed: int = 0) -> list[Replayed]:
    """Replay all ranks of the plan as threads, through the same session as processes."""
    fetch = synthetic_tokens(plan, config.vocab_size, seed)

    def run(meeting: Meeting, rank: int) -> Replayed:
        session = thread_session(plan, fetch, meeting, rank)
        session.transport = record = RecordingTransport(session.transport)
        session.world = RecordingWorld(session.world, record)
        replayed = replay_rank(session, config, seed=seed)
        return replace(replayed, operations=tuple(record.operations))

    return run_ranks(PlanReader(plan).metadata.num_ranks, run)


def replay_alone(plan: Path, config: TinyConfig, *, seed: int = 0) -> Replayed:
    """Replay the plan in a single process without ranks: one sequence at a time, with PyTorch's attention."""
    masked = MaskedAttention()
    model = TinyLanguageModel(config, masked, seed=seed)
    fetch = synthetic_tokens(plan, config.vocab_size, seed)
    return gradients_alone(plan, fetch, model, model, begin=masked.begin)


def gradients_alone(
    plan: Path,
    fetch: Fetch,
    model: nn.Module,
    forward: Callable[[Tensor, Tensor], Tensor],
    *,
    begin: Callable[[Mask, int], None] | None = None,
) -> Replayed:
    """Return the reference result for `gradients_on_rank`.

    Args:
        plan, fetch, model: as for the session and model there.
        forward: maps input ids and position ids [1, tokens] to logits.
        begin: called with the mask and length of each sequence before `forward`; None: `forward` is causal.
    """
    losses, gradients = [], []
    masks = PlanReader(plan).metadata.mask_rows
    for step in PlanReader(plan).steps():
        sequences = list(_labelled_sequences(step, fetch))
        tokens = sum(int((labels != IGNORED).sum()) for _, labels in sequences)
        total = 0.0
        for row, (input_ids, labels) in zip(step.sequences.tolist(), sequences, strict=True):
            mask = CAUSAL if masks is None else masks.mask(row)
            if begin is not None:
                begin(mask, len(input_ids))
            logits = forward(input_ids[None], torch.from_numpy(mask.position_ids(len(input_ids)))[None])
            loss = token_loss_sum(logits, labels[None]) / max(tokens, 1)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        losses.append(total)
        gradients.append(take_gradient(model))
    return Replayed(losses=np.array(losses), gradients=np.stack(gradients))


def _labelled_sequences(step: StepPlan, fetch: Fetch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids, next-token labels) [tokens] of each sequence of a step, truncated to the planned length."""
    for row, length in zip(step.sequences.tolist(), step.lengths.tolist(), strict=True):
        found = fetch(row)
        ids, labels = found if isinstance(found, tuple) else (found, found)
        yield torch.as_tensor(ids)[:length], next_token_labels(torch.as_tensor(labels)[:length])


def take_gradient(model: nn.Module) -> FloatArray:
    """Return and clear the model's flattened gradient [parameters]; FSDP2 shards are gathered."""
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    whole = [piece.full_tensor() if hasattr(piece, "full_tensor") else piece for piece in pieces]
    flat: FloatArray = torch.cat([piece.flatten() for piece in whole]).double().numpy()
    return flat
