"""A vision encoder shared over the wave against over each ring: predicted, and measured on four gloo ranks.

    python -m benchmarks.encoder_wave

Encoder and language model sleep for as long as the cost profile says that they compute, so that the ranks of a machine
with few cores are four; sharing out, exchange, and the meeting between the modules (what FSDP2's gathers are) are real.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fcp_cli.cost.profile import CostProfile, StepTerms, dump_cost_profile, parse_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import EncoderBalance
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.runtime.exchange import exchange
from fcp_cli.runtime.session import Session, start
from fcp_cli.runtime.step import LocalMicroBatch
from fcp_cli.vision.parts import VisualPart, VisualSequence
from tests.runtime.launch import torchrun

RANKS, SEQUENCES, STEPS = 4, 12, 2
LENGTH, PART = 240, 12  # tokens of a sequence, and of a picture; a token of a picture is a patch
PROFILE = """
format: fcp-cost-profile/1
model: sleeping
cluster: sleeping
origin: assumed
coefficients:
  attention_seconds_per_token2: 0.0
  linear_seconds_per_token: 2.0e-3
  ring_bytes_per_token: 1.0e+6
  microbatch_seconds: 0.0
  vision_seconds_per_patch: 3.0e-3
bandwidth_bytes_per_second: {intra_node: 1.0e+7, inter_node: 1.0e+7}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Seconds of a step: as planned, and as the slowest rank ran it."""

    predicted_seconds: float
    measured_seconds: float


def profile() -> CostProfile:
    """Return the profile of a model whose modules run in lockstep."""
    found = replace(parse_cost_profile(PROFILE, name="sleeping"), step=StepTerms(lockstep=True))
    return replace(found, text=dump_cost_profile(found))


def num_pictures(row: int) -> int:
    """Return the pictures of a row: every sixth is all pictures, and the one after it has a few."""
    return {0: LENGTH // PART, 1: 4}.get(row % 6, 0)


def write(path: Path, balance: EncoderBalance | None) -> float:
    """Write a plan; return its predicted seconds of a step."""
    rows = np.arange(SEQUENCES * STEPS)
    table = LengthTable(
        name="made up",
        length_tokens=np.full(len(rows), LENGTH),
        vision_patches=np.array([PART * num_pictures(row) for row in rows.tolist()]),
    )
    problem = Problem(
        num_ranks=RANKS,
        ranks_per_node=RANKS,
        tokens_per_rank=LENGTH,
        sync="microbatch",
        profile=profile(),
        encoder_balance=balance,
    )
    settings = BatchSettings(global_batch_size=SEQUENCES, shuffle=False)
    make_plan(path, PlanInputs(table=table, problem=problem, settings=settings))
    return float(np.mean([step.makespan_seconds for step in PlanReader(path).steps()]))


def fetch(row: int) -> VisualSequence:
    """Return a row, whose pictures have ones for pixels."""
    parts = [
        VisualPart(
            kind="image",
            start_token=PART * number,
            num_tokens=PART,
            work=float(PART),
            grid=(1, PART),
            pixels=lambda: torch.ones(PART, 1),
        )
        for number in range(num_pictures(row))
    ]
    return VisualSequence(tokens=np.zeros(LENGTH, dtype=np.int64), parts=tuple(parts))


class Sleeper(nn.Module):
    """A vision-language model of one weight each."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.encoder = nn.Parameter(torch.ones(1))
        self.head = nn.Parameter(torch.ones(1, 2))
        self._session = session
        self._costs = profile().coefficients

    def forward(self, microbatch: LocalMicroBatch) -> torch.Tensor:
        ring, tokens = microbatch.ring, microbatch.input_ids.shape[1]
        seen, visuals = torch.zeros(1), ring.context.visuals
        if visuals is not None:
            patches = sum(part.num_tokens for part in visuals.parts)
            time.sleep(self._costs.vision_seconds_per_patch * patches)
            pixels = torch.zeros(1, 1) if visuals.pixels is None else visuals.pixels
            seen = exchange(pixels * self.encoder, visuals.route, ring.transport).sum()
            ring.context.encoder_calls += 1
        dist.barrier()
        if not microbatch.row.is_idle:
            time.sleep(self._costs.linear_seconds_per_token * microbatch.row.tokens / microbatch.row.degree)
        ring.attention_calls += 1
        return (torch.ones(1, tokens, 1) * (1 + seen)) @ self.head


def train(plan: Path) -> float:
    """Run a plan on this rank; return the mean seconds of a step."""
    with start(plan, fetch) as session:
        model, seconds = Sleeper(session), []
        for step in session.steps(model):
            dist.barrier()
            begun = time.perf_counter()
            for microbatch in step:
                loss = microbatch.loss(model(microbatch))
                torch.autograd.backward(loss)
            dist.barrier()
            seconds.append(time.perf_counter() - begun)
    return float(np.mean(seconds))


def measure() -> dict[str, Outcome]:
    """Plan and run both ways: `ring` and `wave`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        balances: dict[str, EncoderBalance | None] = {"ring": None, "wave": "wave"}
        predicted = {name: write(folder / f"{name}.parquet", balance) for name, balance in balances.items()}
        torchrun("-m", "benchmarks.encoder_wave", str(folder), num_ranks=RANKS)
        measured = json.loads((folder / "measured.json").read_text())
        return {name: Outcome(predicted_seconds=predicted[name], measured_seconds=measured[name]) for name in balances}


def _run(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {name: train(folder / f"{name}.parquet") for name in ("ring", "wave")}
    if dist.get_rank() == 0:
        (folder / "measured.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) > 1:
        _run(Path(sys.argv[1]))
        return
    found = measure()
    for name, outcome in found.items():
        off = outcome.predicted_seconds / outcome.measured_seconds - 1
        print(
            f"encoder over the {name}: predicted {outcome.predicted_seconds:.3f} s a step, measured "
            f"{outcome.measured_seconds:.3f} s ({off:+.1%})"
        )
    ring, wave = found["ring"], found["wave"]
    print(
        f"gain: predicted {ring.predicted_seconds / wave.predicted_seconds:.2f}x, measured "
        f"{ring.measured_seconds / wave.measured_seconds:.2f}x"
    )


if __name__ == "__main__":
    main()
