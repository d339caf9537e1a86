"""Emulates a job's ranks as threads of one process, and computes the gradients of a plan's steps on its ranks.

The same sequences are also replayed in a single process without ranks. Used by `fcp verify` to replay plans with many
ranks; never on a cluster. On a CPU, autograd runs backward in the calling thread, so the backward pass of a rank may
wait for other ranks.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fcp_cli.cost.recipe import Reduce
from fcp_cli.errors import RunError
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.loader import Fetch
from fcp_cli.runtime.loss import next_token_labels, token_loss_sum
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import LocalMicroBatch
from fcp_cli.runtime.transport import Handle
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.masks import CAUSAL, Mask
from fcp_cli.verification.order import Operation
from fcp_cli.verification.recording import RecordingTransport, RecordingWorld
from fcp_cli.verification.tiny_model import MaskedAttention, TinyConfig, TinyLanguageModel, ring_attend

Result = TypeVar("Result")


class Mailbox:
    """Messages between ranks of one process, in order per (sender, receiver).

    After an abort, receivers get empty messages, which rings reject.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {}
        self._aborted = False

    def between(self, sender: int, receiver: int) -> queue.SimpleQueue[Tensor]:
        """Return the queue of messages from one rank to another."""
        messages = self._queues.setdefault((sender, receiver), queue.SimpleQueue())
        if self._aborted:  # the queue may be new: release its receivers, too
            messages.put(torch.empty(0))
        return messages

    def abort(self) -> None:
        """Release all ranks that wait for a message, now or later."""
        self._aborted = True
        for messages in list(self._queues.values()):
            messages.put(torch.empty(0))


class ThreadTransport:
    """Transport of a rank that runs as a thread.

    Args:
        mailbox: shared by all ranks.
        timeout_seconds: receive timeout, so that a wrong order fails instead of hanging.
    """

    def __init__(self, mailbox: Mailbox, rank: int, timeout_seconds: float = 300.0) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._timeout_seconds = timeout_seconds

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        if send is not None:  # copied, since the ring reuses the buffer in its next hop
            self._mailbox.between(self._rank, to).put(send.detach().clone())
        return Delivery(self._mailbox, self._rank, kind, receive, source, self._timeout_seconds)


@dataclass(slots=True)
class Delivery:
    """A pending receive into a buffer; without a buffer, there is nothing to receive."""

    mailbox: Mailbox
    rank: int
    kind: str
    receive: Tensor | None
    source: int
    timeout_seconds: float

    def ready(self) -> bool:
        return self.receive is None or not self.mailbox.between(self.source, self.rank).empty()

    def wait(self) -> None:
        if self.receive is None:
            return
        try:
            message = self.mailbox.between(self.source, self.rank).get(timeout=self.timeout_seconds)
        except queue.Empty:
            raise RunError(
                f"rank {self.rank} waits for {self.kind} from rank {self.source}, which never arrives"
            ) from None
        if message.shape != self.receive.shape or message.dtype != self.receive.dtype:
            raise RunError(
                f"rank {self.rank} expects {self.kind} {tuple(self.receive.shape)} from rank {self.source}, "
                f"got {tuple(message.shape)}"
            )
        self.receive.copy_(message)


class Meeting:
    """Shared state of the ranks of one process: a barrier for collectives, a mailbox for ring messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.mailbox = Mailbox()
        self.swaps = Mailbox()
        self.slots: list[Tensor | None] = [None] * size
        self.result = torch.empty(0)

    def abort(self) -> None:
        """Release all ranks that wait for a failed one."""
        self.barrier.abort()
        self.mailbox.abort()
        self.swaps.abort()


class Done:
    """Handle of an operation that completes synchronously."""

    def wait(self) -> None:
        pass


class ThreadWorld:
    """A rank's view of a `Meeting`; implements `runtime.transport.World`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._exchange(tensor, lambda tensors: torch.stack(tensors).sum(dim=0))

    def broadcast(self, tensor: Tensor) -> None:
        self._exchange(tensor, lambda tensors: tensors[0])

    def start_all_reduce(self, tensor: Tensor) -> Done:
        self.all_reduce_sum(tensor)
        return Done()

    start_sum = start_all_reduce

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        ThreadTransport(self._meeting.swaps, self._rank).start("word", told, to, heard, source).wait()

    def _exchange(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> None:
        meeting = self._meeting
        meeting.slots[self._rank] = tensor.detach().clone()
        if meeting.barrier.wait() == 0:  # one rank combines, in rank order, for bitwise equal results
            meeting.result = combine([slot for slot in meeting.slots if slot is not None])
        meeting.barrier.wait()
        with torch.no_grad():
            tensor.copy_(meeting.result)
        meeting.barrier.wait()  # all ranks must have read the result before the next collective


def run_ranks(size: int, run: Callable[[Meeting, int], Result]) -> list[Result]:
    """Call `run(meeting, rank)` on one thread per rank; return the results in rank order."""
    meeting = Meeting(size)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = run(meeting, rank)
        except threading.BrokenBarrierError:
            pass  # another rank failed
        except BaseException as error:
            errors.append(error)  # the first is the cause of later ones
            meeting.abort()

    threads = [threading.Thread(target=guarded, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


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
    """Return model sizes whose heads are divisible by all Ulysses degrees of the plan.

    Values have another head size than keys, and the last layer has one key/value head, which ranks that share heads
    replicate.
    """
    shared = {int(u) for step in PlanReader(plan).steps() if step.heads_degree is not None for u in step.heads_degree}
    sizes = TinyConfig()
    heads = math.lcm(sizes.heads, *shared)
    fits = all(not sizes.kv_heads % u or not u % sizes.kv_heads for u in shared)
    head_dim = max(sizes.width // heads // 2 * 2, 2)  # rotary embeddings need an even size
    return TinyConfig(
        width=heads * head_dim,
        heads=heads,
        kv_heads=sizes.kv_heads if fits else 1,
        value_dim=head_dim + 2,
        single_kv_head=True,
    )


def replay_rank(
    session: Session, config: TinyConfig, *, seed: int = 0, on_gather: Callable[[], None] | None = None
) -> Replayed:
    """Replay this rank's part of all steps. Collective.

    Args:
        on_gather: called where FSDP2 would gather weights from all ranks: in every forward under `sync: microbatch`.
    """
    model = TinyLanguageModel(config, ring_attend, seed=seed)
    if on_gather is not None and session.metadata.sync == "microbatch":
        model.register_forward_pre_hook(lambda *_: on_gather())
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
        gather = partial(record.record_collective, "gather weights", torch.empty(0))
        replayed = replay_rank(session, config, seed=seed, on_gather=gather)
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
    flat: FloatArray = torch.cat([piece.flatten() for piece in whole]).cpu().double().numpy()
    return flat
