"""Loops that people write and that would train wrong: what they do differently from a right one, as rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcp_cli.runtime.loader import Fetch
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import LocalMicroBatch, Step
from fcp_cli.verification.emulation import Meeting, run_ranks, synthetic_tokens, thread_session
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, ring_attend
from tests.runtime.models import VOCAB_SIZE
from tests.runtime.plans import Row, write_plan

NUM_RANKS = 2
ROWS: Sequence[Row] = (Row([0, 1], [20, 5]), Row([0], [9]), Row([1], [6]), Row([0, 1], [12]))


@dataclass(kw_only=True, slots=True)
class Rank:
    """What a loop works with on one rank."""

    session: Session
    rank: int
    model: nn.Module

    def logits(self, batch: LocalMicroBatch) -> Tensor:
        logits: Tensor = self.model(batch.input_ids, batch.position_ids, batch.ring)
        return logits


Loop = Callable[[Rank], Any]
OfMicroBatch = Callable[[Rank, LocalMicroBatch], None]


def run(
    folder: Path,
    loop: Loop,
    *,
    rows: Sequence[Row] = ROWS,
    steps: int = 2,
    fetch: Callable[[Fetch, int], Fetch] = lambda tokens, rank: tokens,
    **settings: Any,
) -> list[Any]:
    """Run a loop on two ranks, which are threads; return what it returns on each, or raise what stops the first."""
    plan = write_plan(folder / "plan.parquet", [rows] * steps, num_ranks=NUM_RANKS, **settings)
    tokens = synthetic_tokens(plan, VOCAB_SIZE)

    def on_rank(meeting: Meeting, rank: int) -> Any:
        session = thread_session(plan, fetch(tokens, rank), meeting, rank)
        return loop(Rank(session=session, rank=rank, model=TinyLanguageModel(TinyConfig(), ring_attend)))

    return run_ranks(NUM_RANKS, on_rank)


def backward(loss: Tensor, **kept: Any) -> None:
    torch.autograd.backward(loss, **kept)


def train(step: Step, at: Rank) -> None:
    """What a right loop does with a step."""
    for batch in step:
        backward(batch.loss(at.logits(batch)))


LOOPS: dict[str, Loop] = {}
"""Name of each wrong loop -> it."""


def wrong(loop: Loop) -> Loop:
    LOOPS[loop.__name__] = loop
    return loop


def wrong_in_a_micro_batch(run: OfMicroBatch) -> OfMicroBatch:
    """Add the loop that runs each micro-batch in this way."""

    def loop(at: Rank) -> None:
        for step in at.session.steps(at.model):
            for batch in step:
                run(at, batch)

    LOOPS[run.__name__] = loop
    return run


@wrong
def backward_after_the_loop(at: Rank) -> None:
    for step in at.session.steps(at.model):
        losses = [batch.loss(at.logits(batch)) for batch in step]
        backward(torch.stack(losses).sum())


@wrong_in_a_micro_batch
def backward_never(at: Rank, batch: LocalMicroBatch) -> None:
    batch.loss(at.logits(batch))


@wrong_in_a_micro_batch
def backward_of_some(at: Rank, batch: LocalMicroBatch) -> None:
    """Of those alone that no other rank takes part in."""
    loss = batch.loss(at.logits(batch))
    if batch.ring.degree > 1:
        backward(loss)


@wrong_in_a_micro_batch
def mean_of_a_rank(at: Rank, batch: LocalMicroBatch) -> None:
    backward(functional.cross_entropy(at.logits(batch)[0], batch.labels[0]))


@wrong
def second_model(at: Rank) -> None:
    scale = nn.Linear(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    for step in at.session.steps(at.model):
        for batch in step:
            backward(batch.loss(scale(at.logits(batch))))


@wrong
def no_model(at: Rank) -> None:
    for step in at.session.steps():
        train(step, at)


@wrong_in_a_micro_batch
def evaluation_inside(at: Rank, batch: LocalMicroBatch) -> None:
    loss = batch.loss(at.logits(batch))
    with torch.no_grad():
        at.model(torch.arange(40)[None], torch.arange(40)[None])
    backward(loss)


@wrong_in_a_micro_batch
def one_more_forward(at: Rank, batch: LocalMicroBatch) -> None:
    """On one rank, which says so before the other waits for it."""
    if at.rank == 1 and batch.row.order == 3:
        at.logits(batch)
    backward(batch.loss(at.logits(batch)))


@wrong_in_a_micro_batch
def one_more_forward_at_once(at: Rank, batch: LocalMicroBatch) -> None:
    """In the first micro-batch, where no number is known from others before."""
    if at.rank == 1 and batch.row.step == 0 and batch.row.order == 0:
        at.logits(batch)
    backward(batch.loss(at.logits(batch)))


@wrong_in_a_micro_batch
def one_more_forward_after_its_backward(at: Rank, batch: LocalMicroBatch) -> None:
    backward(batch.loss(at.logits(batch)))
    if at.rank == 1 and batch.row.step == 0 and batch.row.order == 0:
        at.logits(batch)


@wrong_in_a_micro_batch
def one_more_backward_at_once(at: Rank, batch: LocalMicroBatch) -> None:
    loss = batch.loss(at.logits(batch))
    if at.rank == 1 and batch.row.order == 0:
        backward(loss, retain_graph=True)
    backward(loss)


@wrong
def one_more_forward_before_all_backwards(at: Rank) -> None:
    """In a loop that holds its backwards back."""
    for step in at.session.steps(at.model):
        losses = []
        for batch in step:
            if at.rank == 1 and batch.row.order == 0:
                at.logits(batch)
            losses.append(batch.loss(at.logits(batch)))
            if batch.is_last:
                backward(torch.stack(losses).sum())


@wrong_in_a_micro_batch
def one_more_backward(at: Rank, batch: LocalMicroBatch) -> None:
    loss = batch.loss(at.logits(batch))
    if at.rank == 1 and batch.row.step == 1 and batch.ring.degree > 1:
        backward(loss, retain_graph=True)
    backward(loss)


@wrong
def other_first_step(at: Rank) -> None:
    for step in at.session.steps(at.model, first_step=at.rank):
        train(step, at)


@wrong_in_a_micro_batch
def infinite_loss(at: Rank, batch: LocalMicroBatch) -> None:
    bad = at.rank == 1 and batch.row.step == 1 and batch.row.order == 2
    backward(batch.loss(at.logits(batch) * (float("nan") if bad else 1.0)))


def random_tokens(tokens: Fetch, rank: int) -> Fetch:
    """Mask a token at random, as if each rank had a random state of its own."""

    def fetch(row: int) -> Tensor:
        ids = torch.as_tensor(tokens(row)).clone()
        if row == 4:
            ids[rank] = 0
        return ids

    return fetch


def random_labels(tokens: Fetch, rank: int) -> Fetch:
    """The same of labels."""

    def fetch(row: int) -> tuple[Tensor, Tensor]:
        ids = torch.as_tensor(tokens(row))
        labels = ids.clone()
        labels[(5 + rank) % len(labels)] = -100
        return ids, labels

    return fetch
