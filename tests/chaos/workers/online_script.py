"""Trains a small decoder on a stream that is planned while it trains, from its own newest checkpoint."""
# mypy: disable-error-code="arg-type, no-untyped-call"

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fcp_cli import runtime as fcp
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, ring_attend

CONFIG = TinyConfig()
SEQUENCES = 72
EVERY = 3
# Longer than its arithmetic takes, so that a fault strikes within a step.
STEP_SECONDS = 0.3


def tokens_of(name: str) -> torch.Tensor:
    """One sequence of the stream, 4 to 90 tokens long."""
    number = int(name)
    draw = torch.Generator().manual_seed(number)
    return torch.randint(CONFIG.vocab_size, (4 + number * number * 37 % 87,), generator=draw)


def stream() -> Iterator[tuple[str, int]]:
    for number in range(SEQUENCES):
        yield str(number), len(tokens_of(str(number)))


def newest(folder: Path) -> Path | None:
    return max((path.parent for path in folder.glob("step-*/checkpoint.json")), default=None)


def main(output: Path) -> None:
    session = fcp.start(fetch=tokens_of, stream=stream())
    torch.manual_seed(0)
    model = TinyLanguageModel(CONFIG, ring_attend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # its weights are its whole state
    saved = newest(output)
    if saved is not None:
        model.load_state_dict(load_file(saved / "state.safetensors"))
    first_step = int(saved.name.rpartition("-")[2]) if saved is not None else 0
    for step in session.steps(model, first_step=first_step):
        time.sleep(STEP_SECONDS)
        for batch in step:
            batch.loss(model(batch.input_ids, batch.position_ids, batch.ring)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.rank == 0 and (step.index + 1) % EVERY == 0:
            folder = output / f"step-{step.index + 1:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            save_file(model.state_dict(), folder / "state.safetensors")
            (folder / "checkpoint.json").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
