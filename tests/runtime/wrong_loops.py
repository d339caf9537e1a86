"""Loops that people write and that would train wrong: what they do differently from a right one, as rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcp_cli.runtime.data.loader import Fetch
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.step import Step
from fcp_cli.verification.emulation import Meeting, run_ranks
from fcp_cli.verification.model import TinyConfig, TinyLanguageModel, ring_attend
from fcp_cli.verification.replay import synthetic_tokens, thread_session
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


def own_mean(logits: Tensor, batch: LocalMicroBatch) -> Tensor:
    return functional.cross_entropy(logits[0], batch.labels[0])


def backward_after_the_loop(at: Rank) -> None:
    for step in at.session.steps(at.model):
        losses = [batch.loss(at.logits(batch)) for batch in step]
        backward(torch.stack(losses).sum())


def backward_never(at: Rank) -> None:
    for step in at.session.steps(at.model):
        for batch in step:
            batch.loss(at.logits(batch))


def backward_of_some(at: Rank) -> None:
    """Of those alone that no other rank takes part in."""
    for step in at.session.steps(at.model):
        for batch in step:
            loss = batch.loss(at.logits(batch))
            if batch.ring.degree > 1:
                backward(loss)


def mean_of_a_rank(at: Rank) -> None:
    for step in at.session.steps(at.model):
        for batch in step:
            backward(own_mean(at.logits(batch), batch))


def second_model(at: Rank) -> None:
    scale = nn.Linear(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    for step in at.session.steps(at.model):
        for batch in step:
            backward(batch.loss(scale(at.logits(batch))))


def no_model(at: Rank) -> None:
    for step in at.session.steps():
        train(step, at)


def evaluation_inside(at: Rank) -> None:
    for step in at.session.steps(at.model):
        for batch in step:
            loss = batch.loss(at.logits(batch))
            with torch.no_grad():
                at.model(torch.arange(40)[None], torch.arange(40)[None])
            backward(loss)


def one_more_forward(at: Rank) -> None:
    """On one rank, which says so before the other waits for it."""
    for step in at.session.steps(at.model):
        for batch in step:
            if at.rank == 1 and batch.row.order == 3:
                at.logits(batch)
            backward(batch.loss(at.logits(batch)))


def one_more_forward_at_once(at: Rank) -> None:
    """In the first micro-batch, where no number is known from others before."""
    for step in at.session.steps(at.model):
        for batch in step:
            if at.rank == 1 and step.index == 0 and batch.row.order == 0:
                at.logits(batch)
            backward(batch.loss(at.logits(batch)))


def one_more_forward_after_its_backward(at: Rank) -> None:
    for step in at.session.steps(at.model):
        for batch in step:
            backward(batch.loss(at.logits(batch)))
            if at.rank == 1 and step.index == 0 and batch.row.order == 0:
                at.logits(batch)


def one_more_backward_at_once(at: Rank) -> None:
    for step in at.session.steps(at.model):
        for batch in step:
            loss = batch.loss(at.logits(batch))
            if at.rank == 1 and batch.row.order == 0:
                backward(loss, retain_graph=True)
            backward(loss)


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


def one_more_backward(at: Rank) -> None:
    for step in at.session.steps(at.model):
        for batch in step:
            loss = batch.loss(at.logits(batch))
            if at.rank == 1 and step.index == 1 and batch.ring.degree > 1:
                backward(loss, retain_graph=True)
            backward(loss)


def other_first_step(at: Rank) -> None:
    for step in at.session.steps(at.model, first_step=at.rank):
        train(step, at)


def infinite_loss(at: Rank) -> None:
    for step in at.session.steps(at.model):
        for batch in step:
            logits = at.logits(batch)
            bad = at.rank == 1 and step.index == 1 and batch.row.order == 2
            backward(batch.loss(logits * float("nan") if bad else logits))


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        backward_after_the_loop,
        backward_never,
        backward_of_some,
        mean_of_a_rank,
        second_model,
        no_model,
        evaluation_inside,
        one_more_forward,
        one_more_forward_at_once,
        one_more_forward_after_its_backward,
        one_more_forward_before_all_backwards,
        one_more_backward,
        one_more_backward_at_once,
        other_first_step,
        infinite_loss,
    )
}


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
