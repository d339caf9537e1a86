"""Unmodified vision-language models under a plan: encoder, exchange and language model against one process."""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fcp_cli.errors import RunError
from fcp_cli.verification.emulation import Meeting, Replayed, gradients_on_rank, run_ranks, thread_session
from fcp_cli.verification.order import check_order
from fcp_cli.verification.recording import RecordingTransport
from tests.runtime.launch import torchrun
from tests.runtime.plans import Row, write_plan

pytest.importorskip("transformers")

from tests.runtime.vision_families import FAMILIES, Family
from tests.runtime.vision_models import (
    NO_GRADIENT,
    VisionCase,
    alone,
    build,
    fetch,
    in_double,
    rows,
    unmodified,
)
from tests.runtime.workers.vision_worker import APART, CASES, ITERATION, MORE_CASES, SHARED_WAVES, WAVES

pytestmark = [pytest.mark.torch, pytest.mark.hf]

NUM_RANKS = 4
TOLERANCE = 1e-11


def steps(family: Family) -> list[list[Row]]:
    """Groups {3,1}, {2,2} and {4}; packs of text alone, one image, many images, video, and of several of them."""
    make = partial(rows, family=family)
    return [
        make(([0, 1, 3], [0, 1, 2]), ([2], [3]), ([1], [4])),
        make(([0, 2], [0]), ([1, 3], [1, 2, 3]), ([2, 3], [4]), first=5),
        make(([0, 1, 2, 3], [0, 1, 2, 3, 4]), first=10),
        [*make(([1, 2], [0]), ([1, 2, 3], [1, 2, 3, 4]), first=15), Row([0])],
    ]


def waves(family: Family) -> list[list[Row]]:
    """The same groups under FSDP2, where every rank runs as many micro-batches; one wave without any image."""
    make = partial(rows, family=family)
    return [
        make(([0, 1, 3], [0, 1, 2]), ([2], [3]), wave=0) + make(([0, 2], [4, 0]), ([1, 3], [1, 2, 3]), first=4, wave=1),
        make(([0, 1, 2, 3], [4, 0, 1, 2, 3, 4]), first=9, wave=0),
        [*make(([1, 2, 3], [0]), first=15, wave=0), Row([0], wave=0)],
    ]


def apart(family: Family) -> list[list[Row]]:
    """Three ranks hold sequences, the last one none: a wave of text, waves with pictures on some ranks or all."""
    make = partial(rows, family=family)
    one = [
        [*make(([0, 2], [0, 1, 2]), ([1], [3, 4]), wave=0), Row([3], wave=0)],
        [*make(([0, 1, 2], [0]), first=5, wave=1), Row([3], wave=1)],
        [*make(([0], [1]), ([1, 2], [2, 3, 4]), first=6, wave=2), Row([3], wave=2)],
    ]
    another = [[*make(([0, 1, 2], [0, 1, 2, 3, 4]), first=11 - 1, wave=0), Row([3], wave=0)]]
    return [[row for wave in step for row in wave] for step in (one, another)]


def assert_agrees(found: Replayed, expected: Replayed, tolerance: float = TOLERANCE) -> None:
    assert np.abs(found.gradients - expected.gradients).max() <= tolerance
    assert np.abs(found.losses - expected.losses).max() <= tolerance


@pytest.mark.examples(4)
@pytest.mark.parametrize(
    "case",
    [
        VisionCase(),
        VisionCase(frozen=True, recompute="selective"),
        VisionCase(family="qwen3_vl_moe"),
        VisionCase(family="qwen3_5"),
        VisionCase(family="qwen3_5_moe"),
        VisionCase(family="qwen2_5_vl", recompute="selective"),
        VisionCase(family="internvl", recompute="non-reentrant"),
        VisionCase(family="internvl_moe"),
        VisionCase(family="gemma3"),
        VisionCase(family="gemma4"),
    ],
    ids=str,
)
def test_threads_compute_the_gradients_of_one_process_in_an_order_that_cannot_deadlock(
    case: VisionCase, tmp_path: Path
) -> None:
    plan = write_plan(tmp_path / "plan.parquet", steps(case.family), num_ranks=NUM_RANKS)
    # Some of Qwen3.5's code computes in fp32.
    require_trained_on_threads(case, plan, 1e-8 if case.family.startswith("qwen3_5") else TOLERANCE)


@pytest.mark.parametrize("encoder_ranks", [None, 1])
def test_threads_that_share_the_encoder_over_a_wave_compute_the_gradients_of_one_process(
    encoder_ranks: int | None, tmp_path: Path
) -> None:
    case = VisionCase()
    plan = write_plan(
        tmp_path / "plan.parquet",
        apart(case.family) if encoder_ranks else waves(case.family),
        num_ranks=NUM_RANKS,
        sync="microbatch",
        encoder_balance="wave",
        encoder_ranks=encoder_ranks,
    )
    require_trained_on_threads(case, plan, 1e-12)


def require_trained_on_threads(case: VisionCase, plan: Path, tolerance: float) -> None:
    built = [build(case) for _ in range(NUM_RANKS)]  # transformers sets dtypes globally while it builds: not on threads

    def run(meeting: Meeting, rank: int) -> tuple[Replayed, RecordingTransport]:
        session = thread_session(plan, fetch(case), meeting, rank)
        record = session.transport = RecordingTransport(session.transport)
        with in_double(case):
            return gradients_on_rank(session, *built[rank]), record

    expected = alone(case, plan)
    ranks = run_ranks(NUM_RANKS, run)
    for found, _ in ranks:
        assert_agrees(found, expected, tolerance)
    check_order({rank: record.operations for rank, (_, record) in enumerate(ranks)})


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_has_a_gradient_in_every_trained_parameter(family: Family, frozen: bool) -> None:
    """Else agreement would say nothing of the encoder, its projector or the deepstack."""
    models = FAMILIES[family]
    model = unmodified(VisionCase(family=family, frozen=frozen))
    for row in range(5):
        torch.autograd.backward(models.logits_alone(model, models.inputs_of(row)).square().mean())
    for name, parameter in model.named_parameters():
        if frozen and "language_model" not in name and "lm_head" not in name:
            assert parameter.grad is None, name
        elif not name.endswith(NO_GRADIENT):
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6, name


def test_pixels_belong_to_the_data_not_to_the_call(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [rows(([0], [0]))], num_ranks=1)
    model, _ = build(VisionCase())
    session = thread_session(plan, fetch(VisionCase()), Meeting(1), 0)
    for microbatch in next(session.steps(model)):
        with pytest.raises(RunError, match=r"was given pixel_values, .*; remove them: fetch gives images"):
            model(
                input_ids=microbatch.input_ids,
                position_ids=microbatch.position_ids,
                pixel_values=torch.zeros(4, 96),
            )
        break


@cache
def gloo_job(*, full: bool) -> tuple[dict[str, list[Replayed]], dict[tuple[str, VisionCase], Replayed]]:
    """Case -> what each rank computed, and what one process computes; one launch serves all examples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_plans(folder)
        torchrun("-m", "tests.runtime.workers.vision_worker", name, *(["full"] if full else []), num_ranks=NUM_RANKS)
        found: dict[str, list[Replayed]] = {}
        for path in sorted(folder.glob("*.pickle")):
            found.setdefault(path.stem.rpartition("-")[0], []).append(pickle.loads(path.read_bytes()))
        unlike = {of_one_process(plan, case) for plan, case in map(CASES.__getitem__, found)}
        return found, {(plan, case): alone(case, folder / f"{case.family}-{plan}") for plan, case in unlike}


def of_one_process(plan: str, case: VisionCase) -> tuple[str, VisionCase]:
    """The plan and the case without what changes nothing in one process."""
    return WAVES if plan == SHARED_WAVES else plan, replace(case, recompute="off", wrapping="none")


def write_plans(folder: Path) -> None:
    for family in FAMILIES:
        write_plan(folder / f"{family}-{ITERATION}", steps(family), num_ranks=NUM_RANKS)
        write_plan(folder / f"{family}-{WAVES}", waves(family), num_ranks=NUM_RANKS, sync="microbatch")
        write_plan(
            folder / f"{family}-{APART}",
            apart(family),
            num_ranks=NUM_RANKS,
            sync="microbatch",
            encoder_balance="wave",
            encoder_ranks=1,
        )
        write_plan(
            folder / f"{family}-{SHARED_WAVES}",
            waves(family),
            num_ranks=NUM_RANKS,
            sync="microbatch",
            encoder_balance="wave",
        )


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in MORE_CASES else ()) for name in CASES]
)
def test_gloo_ranks_compute_the_gradients_of_one_process(name: str) -> None:
    plan, case = CASES[name]
    jobs, references = gloo_job(full=name in MORE_CASES)
    assert len(jobs[name]) == NUM_RANKS
    for found in jobs[name]:
        assert_agrees(found, references[of_one_process(plan, case)])
