"""Sequences that `fetch` gives with a mask: steps of a plan, labels, positions, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data import CollatedRows
from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.loader import load_shard
from fcp_cli.runtime.loss import next_token_labels
from fcp_cli.runtime.plan_agreement import require_causal
from fcp_cli.runtime.planner_process import item_of
from fcp_cli.runtime.ring import Ring
from fcp_cli.training.data import open_data
from fcp_cli.util.masks import CAUSAL, Mask, MaskedSequence, chunk_pairs, full, prefix, segments
from fcp_cli.verification.emulation import (
    Meeting,
    Replayed,
    gradients_on_rank,
    run_ranks,
    take_gradient,
    thread_session,
)
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, ring_attend
from fcp_cli.vision.parts import VisualSequence
from tests.masks import Masked, seen
from tests.runtime.plans import Row, microbatch, write_plan

pytestmark = pytest.mark.torch

LENGTHS = [38, 21, 30, 1, 24, 17]
MASKS = [chunk_pairs([4, 4, 4, 7]), full(), prefix(11), full(), segments([(2, 9), (15, 24)]), CAUSAL]
PLAN = [Row([0, 1, 2], [38, 21]), Row([2], [30]), Row([0, 1, 2, 3], [1, 24], heads_degree=2), Row([1, 3], [17])]


def sequence(row: int) -> Any:
    """A sequence with its mask; causal ones come as they always do, images as the loader takes them."""
    tokens = np.random.default_rng(row).integers(0, 61, LENGTHS[row])
    labels = np.where(np.arange(len(tokens)) % 3 == 0, IGNORED, tokens)
    if row == 5:
        return tokens, labels
    if row == 4:
        return VisualSequence(tokens=tokens, labels=labels, mask=MASKS[row])
    return MaskedSequence(tokens=tokens, labels=labels, mask=MASKS[row], own_labels=row == 1)


def expected_gradient() -> np.ndarray:
    """Of all sequences in one process, each with its mask as a matrix."""
    matrix = torch.empty(0)

    def attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=matrix, enable_gqa=True)

    model = TinyLanguageModel(TinyConfig(), attend)
    total, learned = torch.zeros((), dtype=torch.float64), 0
    for row, mask in enumerate(MASKS):
        found = sequence(row)
        tokens, labels = found if isinstance(found, tuple) else (found.tokens, found.labels)
        targets = torch.as_tensor(labels) if row == 1 else next_token_labels(torch.as_tensor(labels))
        matrix = torch.from_numpy(seen(Masked(mask, LENGTHS[row])))
        positions = torch.from_numpy(mask.position_ids(LENGTHS[row]))
        logits = model(torch.as_tensor(tokens)[None], positions[None])
        total = total + functional.cross_entropy(logits[0], targets, ignore_index=IGNORED, reduction="sum")
        learned += int((targets != IGNORED).sum())
    torch.autograd.backward(total / learned)
    return take_gradient(model)[None]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_over_masked_sequences_has_the_gradient_of_one_process(tmp_path: Path, recompute: Any) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [PLAN], num_ranks=4)

    def run(meeting: Meeting, rank: int) -> Replayed:
        session = thread_session(plan, sequence, meeting, rank)
        model = TinyLanguageModel(TinyConfig(recompute=recompute), ring_attend)
        return gradients_on_rank(session, model, lambda mb: mb.loss(model(mb.input_ids, mb.position_ids, mb.ring)))

    expected = expected_gradient()
    for replayed in run_ranks(4, run):
        assert np.abs(replayed.gradients - expected).max() <= 1e-12


def test_noisy_tokens_have_positions_of_their_clean_ones_and_own_labels_stay_where_they_are() -> None:
    tokens = np.arange(10, 16)
    found = MaskedSequence(tokens=tokens, labels=tokens + 100, mask=chunk_pairs([1, 2]), own_labels=True)
    shard = load_shard(microbatch([6]), lambda row: found, rank=0, labelled=True)
    assert shard.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert shard.labels.tolist() == [[110, 111, 112, 113, 114, 115]]
    given = MaskedSequence(tokens=tokens, mask=full(), position_ids=np.arange(12).reshape(2, 6))
    shard = load_shard(microbatch([6]), lambda row: given, rank=0)
    assert shard.position_ids[:, 0].tolist() == np.arange(12).reshape(2, 6).tolist()
    assert shard.labels.tolist() == [[11, 12, 13, 14, 15, IGNORED]]


def test_a_longer_sequence_is_cut_with_its_mask() -> None:
    found = MaskedSequence(tokens=np.arange(20), mask=prefix(15))
    shard = load_shard(microbatch([10]), lambda row: found, rank=0)
    assert [one.segments.causal for one in shard.layout.ring.hops(0, 0)] == [False], "all that is left is prefix"


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        (
            14,
            chunk_pairs([3, 4]),
            "row 0 of the data has 14 tokens, 10 in the plan, but its mask has chunk pairs of 14",
        ),
        (
            10,
            chunk_pairs([3, 4]),
            "row 0 of the data has 10 tokens, 10 in the plan, but its mask has chunk pairs of 14",
        ),
        (
            12,
            segments([(2, 13)]),
            "row 0 of the data has 12 tokens, 10 in the plan, but its mask has a span up to token",
        ),
    ],
)
def test_a_mask_that_does_not_fit_its_sequence_is_named(tokens: int, mask: Mask, message: str) -> None:
    found = MaskedSequence(tokens=np.arange(tokens), mask=mask)
    with pytest.raises(RunError, match=message):
        load_shard(microbatch([10]), lambda row: found, rank=0)


def test_ranks_of_a_ring_that_get_other_masks_notice() -> None:
    digests = []
    for mask in (prefix(3), prefix(4), CAUSAL):
        rows = [MaskedSequence(tokens=np.arange(10), mask=mask)]
        shard = load_shard(microbatch([10], (0, 1)), rows.__getitem__, rank=0)
        assert shard.digest is not None
        digests.append(shard.digest.digests[0])
    assert len(set(digests)) == 3


def test_a_stream_s_rows_are_planned_by_their_masks() -> None:
    assert item_of(MaskedSequence(tokens=np.arange(10), mask=full()), 0).factors == {"eta": 1.0}
    assert item_of(VisualSequence(tokens=np.arange(10)), 0).factors == {}


def test_what_has_no_masks_refuses_a_plan_that_was_made_for_some(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [PLAN], num_ranks=4, rows=6, masked_sequences=5)
    metadata = PlanReader(plan).metadata
    message = (
        r"was planned for 5 sequences with masks \(column eta of .*\), but {} would train them causally; plan lengths"
    )
    with pytest.raises(RunError, match=message.format("pairs of answers")):
        CollatedRows(SimpleNamespace(dataset=[[1]] * 6), plan, metadata, pairs=True)
    with pytest.raises(RunError, match=message.format("random tokens")):
        open_data(plan, (), vocab_size=64, seed=0)
    with pytest.raises(RunError, match=message.format("Megatron")):
        require_causal(metadata, plan, "Megatron")
    plain = write_plan(tmp_path / "plain.parquet", [PLAN], num_ranks=4)
    require_causal(PlanReader(plain).metadata, plain, "Megatron")
