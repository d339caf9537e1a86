"""One rank of reinforcement learning in small: log-probabilities forward-only, then training, each under its own plan.

Run by torchrun as `-m tests.runtime.workers.rollout_worker FOLDER`. The folder holds the cost profile.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fcp_cli import Planner
from fcp_cli.planning.rollouts import Rollouts
from fcp_cli.runtime.session import start
from fcp_cli.util.arrays import IntArray
from fcp_cli.verification.emulation import take_gradient
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, ring_attend
from tests.runtime.workers.leave import join_job, leave_cases, leave_job

CPU = torch.device("cpu")
CONFIG = TinyConfig()
BATCH = 6
ARRIVALS = [8, 4]  # rollouts that come before each batch: two of the first are late, and wait for the second
MINI_BATCHES = 2
RATE = 0.5


def tokens_of(number: int) -> IntArray:
    """Rollout `number`; one in four is longer than a rank holds in training."""
    draw = np.random.default_rng((2, number))
    return draw.integers(CONFIG.vocab_size, size=70 if number % 4 == 2 else int(draw.integers(2, 40)))


def policy_loss(new: Tensor, old: Tensor, reference: Tensor, advantage: Tensor) -> Tensor:
    """Return the sum over tokens of a policy gradient's objective with a penalty for leaving the reference."""
    return ((new - old).exp() * advantage + 0.3 * (new - reference) ** 2).sum()


def advantages(rows: dict[int, Tensor]) -> dict[int, Tensor]:
    return {row: torch.full_like(values, 0.1 * (row % 5) - 0.2) for row, values in rows.items()}


def learn(folder: Path) -> dict[str, Any]:
    rollouts = Rollouts(fewest=BATCH, most=BATCH)
    known: dict[str, Any] = {"ranks": 4, "ranks_per_node": 2, "sync": "iteration"}
    forward = Planner(folder / "profile.yaml", tokens_per_rank=80, phase="forward", **known)
    training = Planner(folder / "profile.yaml", tokens_per_rank=40, **known)
    options: dict[str, Any] = {"ahead": 0, "stream_begins": "here"}
    scoring = start(
        folder / "forward.parquet", tokens_of, stream=rollouts.batches(), planner=forward.online(**options), device=CPU
    )
    learning = start(
        folder / "training.parquet",
        tokens_of,
        stream=rollouts.batches(parts=MINI_BATCHES),
        planner=training.online(**options),
        device=CPU,
    )
    policy = TinyLanguageModel(CONFIG, ring_attend)
    reference = TinyLanguageModel(CONFIG, ring_attend, seed=1)
    passes, steps = scoring.steps(policy), learning.steps(policy)
    found: dict[str, Any] = {"old": {}, "reference": {}, "gradients": [], "rows": []}
    for iteration, arriving in enumerate(ARRIVALS):
        first = sum(ARRIVALS[:iteration])
        for number in range(first, first + arriving):
            rollouts.add(number, len(tokens_of(number)))
        scored: dict[str, list[Tensor]] = {"old": [], "reference": []}
        step = next(passes)
        for microbatch in step:
            assert not torch.is_grad_enabled()
            for name, model in (("old", policy), ("reference", reference)):
                logits = model(microbatch.input_ids, microbatch.position_ids, microbatch.ring)
                scored[name].append(microbatch.log_probs(logits))
        assert torch.is_grad_enabled()
        old, kept = step.collect(scored["old"]), step.collect(scored["reference"])
        found["old"] |= {row: values.numpy() for row, values in old.items()}
        found["reference"] |= {row: values.numpy() for row, values in kept.items()}
        gain = advantages(old)
        for _ in range(MINI_BATCHES):
            step = next(steps)
            for microbatch in step:
                new = microbatch.log_probs(policy(microbatch.input_ids, microbatch.position_ids, microbatch.ring))
                parts = [microbatch.part_of(values) for values in (old, kept, gain)]
                torch.autograd.backward(microbatch.normalised(policy_loss(new, *parts)))
            with torch.no_grad():
                for parameter in policy.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(RATE * parameter.grad)
            found["gradients"].append(take_gradient(policy))
    rollouts.end()
    assert next(passes, None) is None and next(steps, None) is None
    return found


def train_under_a_plan_of_forward_passes(folder: Path) -> None:
    dist.barrier()  # rank 0 has written it
    model = TinyLanguageModel(CONFIG, ring_attend)
    try:
        for step in start(folder / "forward.parquet", tokens_of, device=CPU).steps(model):
            for microbatch in step:
                logits = model(microbatch.input_ids, microbatch.position_ids, microbatch.ring)
                torch.autograd.backward(microbatch.loss(logits))
    finally:
        assert torch.is_grad_enabled()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    join_job()
    where = Path(sys.argv[1])
    runs = {"learned": learn, "under a plan of forward passes": train_under_a_plan_of_forward_passes}
    leave_cases(where, {name: partial(run, where) for name, run in runs.items()})
    leave_job()
