"""Two passes over one rollout, each under a plan of its own: what one process computes, on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import manifest_of
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.loss import next_token_labels
from fcp_cli.runtime.step import token_log_probs
from fcp_cli.verification.emulation import take_gradient
from fcp_cli.verification.tiny_model import TinyLanguageModel, plain_attend
from tests.planning.examples import PROFILE
from tests.runtime.launch import run_worker
from tests.runtime.workers.rollout_worker import ARRIVALS, BATCH, CONFIG, RATE, advantages, policy_loss, tokens_of

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    (folder / "profile.yaml").write_text(PROFILE)
    return folder


@pytest.fixture(scope="module")
def left(folder: Path) -> dict[str, list[Any]]:
    """What each of four ranks left that scored rollouts and trained on them."""
    return run_worker("rollout_worker", folder, num_ranks=4)


def log_probs(model: TinyLanguageModel, number: int) -> Tensor:
    """The log-probabilities of one rollout in one process."""
    tokens = torch.from_numpy(tokens_of(number))
    logits = model(tokens[None], torch.arange(len(tokens))[None], None)
    return token_log_probs(logits, next_token_labels(tokens)[None])[0]


@pytest.mark.distributed
@pytest.mark.full
def test_log_probabilities_and_the_training_on_them_equal_one_process(folder: Path, left: dict[str, list[Any]]) -> None:
    policy = TinyLanguageModel(CONFIG, plain_attend)
    reference = TinyLanguageModel(CONFIG, plain_attend, seed=1)
    trained = list(PlanReader(folder / "training.parquet").steps())
    scored: dict[str, dict[int, Tensor]] = {"old": {}, "reference": {}}
    gradients = []
    for first, step in enumerate(trained):
        if first % 2 == 0:
            begins = BATCH * first // 2
            with torch.no_grad():
                for number in range(begins, begins + BATCH):
                    scored["old"][number] = log_probs(policy, number)
                    scored["reference"][number] = log_probs(reference, number)
        gain = advantages(scored["old"])
        rows = step.sequences.tolist()
        losses = [
            policy_loss(log_probs(policy, row), scored["old"][row], scored["reference"][row], gain[row]) for row in rows
        ]
        loss = torch.stack(losses).sum()
        torch.autograd.backward(loss / sum(len(tokens_of(row)) - 1 for row in rows))
        with torch.no_grad():
            for parameter in policy.parameters():
                assert parameter.grad is not None
                parameter.sub_(RATE * parameter.grad)
        gradients.append(take_gradient(policy))
    for found in left["learned"]:
        for name, alone in scored.items():
            assert found[name].keys() == alone.keys() == set(range(sum(ARRIVALS)))
            for row, values in alone.items():
                np.testing.assert_allclose(found[name][row], values.numpy(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.stack(found["gradients"]), np.stack(gradients), rtol=0, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.full
def test_the_passes_have_sound_plans_of_their_own(folder: Path, left: dict[str, list[Any]]) -> None:
    plans = {name: PlanReader(folder / f"{name}.parquet") for name in ("forward", "training")}
    assert [reader.metadata.phase for reader in plans.values()] == ["forward", None]
    assert [reader.metadata.steps for reader in plans.values()] == [2, 4]
    for name, reader in plans.items():
        path = folder / f"{name}.parquet"
        assert list(check_plan(path, manifest=read_manifest(manifest_of(path)))) == []
        assert any(len(row.ranks) > 1 for step in reader.steps() for row in step.microbatches())


@pytest.mark.distributed
@pytest.mark.full
def test_a_loop_that_trains_under_a_plan_of_forward_passes_stops_with_one_line(left: dict[str, list[Any]]) -> None:
    for rank, said in enumerate(left["under a plan of forward passes"]):
        assert said.endswith(
            f"rank {rank}: the plan is of forward passes (phase forward), whose micro-batches have no backward; train "
            "under a plan that was made without --phase forward"
        )


def test_a_token_without_a_label_has_no_log_probability() -> None:
    logits = torch.randn(1, 5, 7, dtype=torch.float64)
    labels = torch.tensor([[3, IGNORED, 0, 6, IGNORED]])
    found = token_log_probs(logits, labels)
    assert found[0, 1] == found[0, 4] == 0.0
    assert torch.equal(found[0, 3], torch.log_softmax(logits, -1)[0, 3, 6])
