"""What the tests of other projects' loops share: plans, the model, and what a loop leaves to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync
from fcp_cli.runtime.loader import Fetch
from fcp_cli.runtime.loss import next_token_labels, token_loss_sum
from fcp_cli.verification.emulation import synthetic_tokens
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, plain_attend, ring_attend
from tests.runtime.plans import Row, write_plan

NUM_RANKS = 3
LEARNING_RATE = 1e-3

# Ranks run 2, 1 and 3 micro-batches, then 1, 3 and 1, then 2, 2 and 1.
_UNEQUAL = [
    [Row([0, 1], [23, 4]), Row([0, 2], [17]), Row([2], [9, 3]), Row([2], [12])],
    [Row([0, 1, 2], [31]), Row([1], [5, 8]), Row([1], [14])],
    [Row([0, 1], [19]), Row([1], [6]), Row([0, 2], [21, 2])],
]
_WAVES = [
    [Row([0, 1], [23, 4], 0), Row([2], [9, 3], 0), Row([0, 1, 2], [17], 1)],
    [Row([0, 1, 2], [31], 0)],
    [Row([0], [6], 0), Row([1, 2], [21, 2], 0), Row([0, 1], [19], 1), Row([2], (), 1)],
]
SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")


def write_plans(folder: Path) -> None:
    """Write a plan under either sync, `iteration.parquet` and `microbatch.parquet`."""
    for sync, steps in zip(SYNCS, (_UNEQUAL, _WAVES), strict=True):
        write_plan(folder / f"{sync}.parquet", steps, num_ranks=NUM_RANKS, sync=sync)


def tokens_of(plan: Path) -> Fetch:
    return synthetic_tokens(plan, TinyConfig().vocab_size)


def model_under_a_plan(dtype: torch.dtype = torch.float32) -> TinyLanguageModel:
    return TinyLanguageModel(TinyConfig(), ring_attend, dtype=dtype)


def model_alone(dtype: torch.dtype = torch.float32) -> TinyLanguageModel:
    return TinyLanguageModel(TinyConfig(), plain_attend, dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """One sequence of a global batch: [1, tokens] each, and the tokens of the batch that carry a loss."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    batch_tokens: int
    is_last: bool

    def loss(self, logits: Tensor) -> Tensor:
        return token_loss_sum(logits, self.labels) / self.batch_tokens


def global_batches(plan: Path, fetch: Fetch | None = None) -> Iterator[list[Sequence]]:
    """Yield the sequences of each step, as a script that knows of no plan would read them."""
    fetch = fetch or tokens_of(plan)
    for step in PlanReader(plan).steps():
        tokens = int((step.lengths - 1).sum())
        last = len(step.sequences) - 1
        batch = []
        for position, (row, length) in enumerate(zip(step.sequences.tolist(), step.lengths.tolist(), strict=True)):
            found = fetch(row)
            ids = torch.as_tensor(found[0] if isinstance(found, tuple) else found)[:length]
            batch.append(
                Sequence(
                    input_ids=ids[None],
                    position_ids=torch.arange(length)[None],
                    labels=next_token_labels(ids)[None],
                    batch_tokens=tokens,
                    is_last=position == last,
                )
            )
        yield batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a loop leaves: the loss and the gradient's norm of every step, and the weights it ends with, flat."""

    losses: list[float]
    norms: list[float]
    weights: np.ndarray[tuple[int, ...], np.dtype[np.float64]]

    def since(self, step: int) -> Trained:
        """Return what a run leaves that was resumed at a step."""
        return Trained(losses=self.losses[step:], norms=self.norms[step:], weights=self.weights)


def flat(model: nn.Module) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the weights of a model that no rank holds a part of only."""
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([p.detach().double().flatten() for p in whole]).numpy()


def norm_of(model: nn.Module) -> float:
    """The norm of a model's gradient, in fp64: an fp32 norm of half a million numbers is 5e-5 off on the CPU."""
    whole: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    pieces = [(g.full_tensor() if hasattr(g, "full_tensor") else g).double().flatten() for g in whole]
    return float(torch.cat(pieces).norm())


def train_alone(
    model: nn.Module, batches: Iterable[list[Sequence]], logits_of: Callable[[Sequence], Tensor]
) -> Trained:
    """Train on global batches in one process, in plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for batch in batches:
        total = 0.0
        for sequence in batch:
            loss = sequence.loss(logits_of(sequence))
            torch.autograd.backward(loss)
            total += float(loss.detach())
        losses.append(total)
        norms.append(norm_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses=losses, norms=norms, weights=flat(model))


def trained_by_torch(plan: Path) -> Trained:
    """The tiny model, trained alone on a plan's global batches."""
    model = model_alone()
    return train_alone(model, global_batches(plan), lambda one: model(one.input_ids, one.position_ids))


def worst_difference(found: Trained, alone: Trained) -> float:
    """Return the largest relative difference of losses, norms and weights (of weights: in the L2 norm)."""
    weights = np.linalg.norm(found.weights - alone.weights) / np.linalg.norm(alone.weights)
    pairs = zip([*found.losses, *found.norms], [*alone.losses, *alone.norms], strict=True)
    return max(float(weights), *(abs(a - b) / abs(b) for a, b in pairs))
