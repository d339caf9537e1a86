"""The examples that follow a plan in plain sight print the numbers of one process that trains the same global batches."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fcp_cli.util.processes import torchrun_argv
from tests.patience import PATIENCE_SECONDS
from tests.runtime.launch import ROOT
from tests.runtime.plans import Row, write_plan

pytest.importorskip("datasets", reason="the examples read data by datasets")

pytestmark = [pytest.mark.hf, pytest.mark.full, pytest.mark.processes, pytest.mark.distributed]

EXAMPLES = ROOT / "examples" / "hugging_face"
SCRIPT = runpy.run_path(str(EXAMPLES / "train.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a plan of the examples' rows in which a ring, packs and other numbers of micro-batches occur."""
    folder = tmp_path_factory.mktemp("examples")
    lengths = [len(ids) for ids in SCRIPT["rows"]()["input_ids"]]
    steps = [
        (Row((0, 1), batch[:1]), Row((0,), batch[1:4]), Row((1,), batch[4:6]), Row((1,), batch[6:]))
        for batch in (lengths[first : first + 8] for first in range(0, 24, 8))
    ]
    write_plan(folder / "plan.parquet", steps, num_ranks=2, rows=len(lengths))
    return folder


@pytest.fixture(scope="module")
def alone() -> list[tuple[float, float]]:
    """Loss and gradient norm of each step in one process."""
    model, ids = SCRIPT["small_model"](), SCRIPT["rows"]()["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=3)
    found = []
    for first in range(0, 24, 8):
        batch = [torch.tensor([row]) for row in ids[first : first + 8]]
        sums = [functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="sum") for row in batch]
        loss = torch.stack(sums).sum() / sum(row.shape[1] - 1 for row in batch)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


@pytest.mark.parametrize("name", ["planned_trainer.py", "own_loop.py"])
def test_an_example_trains_as_one_process(name: str, folder: Path, alone: list[tuple[float, float]]) -> None:
    done = subprocess.run(
        [*torchrun_argv(2), str(EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FCP_PLAN": str(folder / "plan.parquet"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    numbers = re.findall(r"loss'?:? '?([\d.]+)'?, '?(?:grad_norm'?:|gradient norm) '?([\d.]+)", done.stdout)
    assert len(numbers) == 3, done.stdout
    for (loss, norm), (expected, expected_norm) in zip(numbers, alone, strict=True):
        assert float(loss) == pytest.approx(expected, rel=5e-4 if name == "planned_trainer.py" else 1e-6)
        assert float(norm) == pytest.approx(expected_norm, rel=5e-4 if name == "planned_trainer.py" else 1e-5)
