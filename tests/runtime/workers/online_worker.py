"""One rank of a job that plans while it trains; each case leaves `CASE-RANK.pickle`.

Run by torchrun as `-m tests.runtime.workers.online_worker FOLDER`. The folder holds the cost profile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from fcp_cli import Planner
from fcp_cli.runtime.session import Session, start
from fcp_cli.runtime.step import LocalMicroBatch
from fcp_cli.util.arrays import IntArray
from fcp_cli.verification.emulation import take_gradient
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, ring_attend
from tests.runtime.workers.leave import join_job, leave_cases, leave_job

CPU = torch.device("cpu")
CONFIG = TinyConfig()
RULE = {"global_batch_size": 6}


def tokens_of(number: int) -> IntArray:
    """Sequence `number` of the stream, 4 to 90 tokens long; one in five is longer than a rank holds."""
    draw = np.random.default_rng((1, number))
    length = 90 if number % 5 == 3 else int(draw.integers(4, 40))
    return draw.integers(CONFIG.vocab_size, size=length)


def drawn(first: int = 0) -> Iterator[tuple[str, int]]:
    """36 sequences whose lengths nobody knew before."""
    for number in range(first, 36):
        yield f"text-{number}", len(tokens_of(number))


def by_id(given: Any) -> IntArray:
    return tokens_of(int(given.removeprefix("text-")))


class Shuffled(IterableDataset[Any]):
    """Rows in worker processes, through a shuffle buffer."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        generator = np.random.default_rng(worker.id)
        buffer: list[int] = []
        for number in range(worker.id, 36, worker.num_workers):
            buffer.append(number)
            if len(buffer) > 8:
                yield {"input_ids": tokens_of(buffer.pop(int(generator.integers(len(buffer))))).tolist()}
        yield from ({"input_ids": tokens_of(number).tolist()} for number in buffer)


def take_part(microbatch: LocalMicroBatch, model: TinyLanguageModel) -> None:
    logits = model(microbatch.input_ids, microbatch.position_ids, microbatch.ring)
    torch.autograd.backward(microbatch.loss(logits))


def followed(session: Session, first_step: int = 0, most: int = 6) -> dict[str, Any]:
    """Run steps, and return their losses and gradients."""
    model = TinyLanguageModel(CONFIG, ring_attend)
    losses, gradients, sequences = [], [], []
    loop = session.steps(model, first_step=first_step)
    for step in loop:
        for microbatch in step:
            take_part(microbatch, model)
            sequences += [list(microbatch.row.lengths)]
        losses.append(step.reduced_loss())
        gradients.append(take_gradient(model))
        if len(losses) == most:
            break
    loop.close()
    return {"losses": losses, "gradients": gradients, "lengths": sequences}


def run_cases(folder: Path) -> None:
    profile = folder / "profile.yaml"
    planner = Planner(profile, ranks=4, ranks_per_node=2, tokens_per_rank=40, sync="iteration")

    def online(name: str, stream: Any, fetch: Any = by_id, **options: Any) -> Session:
        settings = planner.online(**{**RULE, **options})
        return start(folder / f"{name}.parquet", fetch, stream=stream, planner=settings, device=CPU)

    def offline() -> dict[str, Any]:
        dist.barrier()  # rank 0 has written the plan
        return followed(start(folder / "online.parquet", tokens_of, device=CPU))

    def restarted() -> dict[str, Any]:
        first = followed(online("restarted", drawn()), most=3)
        second = followed(online("restarted", drawn()), first_step=2)
        return {"losses": first["losses"][:2] + second["losses"]}

    def on_policy() -> dict[str, Any]:
        """A stream whose next batch is there only when the step before is over."""
        trained: list[int] = []

        def rollouts() -> Iterator[list[tuple[str, int]]]:
            for step in range(4):
                assert len(trained) == step, f"batch {step} was asked for after {len(trained)} steps"
                yield [(f"text-{number}", len(tokens_of(number))) for number in range(step * 6, step * 6 + 2 + step)]

        settings = planner.online(ahead=0, stream_begins="here")
        session = start(folder / "policy.parquet", by_id, stream=rollouts(), planner=settings, device=CPU)
        model = TinyLanguageModel(CONFIG, ring_attend)
        for step in session.steps(model):
            for microbatch in step:
                take_part(microbatch, model)
            trained.append(step.index)
        return {"trained": trained}

    def slow() -> dict[str, Any]:
        """Rank 2 takes 1 / 0.7 of what others take, and all work is sleep, so that only plans differ."""
        found = {}
        roomy = Planner(profile, ranks=4, ranks_per_node=2, tokens_per_rank=160, sync="iteration")
        for name, every in (("blind", None), ("slow", 4)):
            fixed = roomy.online(global_batch_size=48, refit_every=every, ahead=1)
            stream = ((number, 20 + 7 * number % 20) for number in range(48 * 14))
            session = start(
                folder / f"{name}.parquet",
                lambda number: np.zeros(20 + 7 * number % 20, dtype=np.int64),
                stream=stream,
                planner=fixed,
                device=CPU,
                metrics=folder / f"{name}.metrics.jsonl",
            )
            model = TinyLanguageModel(CONFIG, ring_attend)
            for step in session.steps(model):
                for microbatch in step:
                    row = microbatch.row
                    seconds = (0.02 + 8e-4 * row.tokens / row.degree) * (1 / 0.7 if dist.get_rank() == 2 else 1.0)
                    time.sleep(seconds if row.tokens else 0.0)
                    take_part(microbatch, model)
            session.recorder.close()  # type: ignore[union-attr]
            records = [json.loads(line) for line in (folder / f"{name}.metrics.jsonl").read_text().splitlines()]
            found[name] = [
                max(one["start_seconds"] + one["seconds"] for rank in record["ranks"] for one in rank["micro_batches"])
                for record in records
                if record["kind"] == "step"
            ]
        return found

    rows = DataLoader(Shuffled(), batch_size=None, num_workers=2)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "online": lambda: followed(online("online", drawn())),
        "offline": offline,
        "restarted": restarted,
        "policy": on_policy,
        "slow": slow,
        "rows": lambda: followed(online("rows", rows, None)),
    }
    leave_cases(folder, cases)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    join_job()
    run_cases(Path(sys.argv[1]))
    leave_job()
