"""Whole steps through the session: on threads for many plans, and on one launch of gloo ranks for every wrapping."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.recipe import Recompute
from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import Sync
from fcp_cli.runtime.cursor import plan_path
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import LocalMicroBatch, Step
from fcp_cli.verification.emulation import (
    Meeting,
    Replayed,
    gradients_on_rank,
    replay_alone,
    replay_threads,
    run_ranks,
    synthetic_tokens,
    take_gradient,
    thread_session,
    tiny_config,
)
from fcp_cli.verification.order import check_order
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, ring_attend
from tests.runtime.launch import run_worker
from tests.runtime.models import VOCAB_SIZE, Case, assert_agrees, build, expected
from tests.runtime.plans import Row, random_steps, sharing_heads, write_plan
from tests.runtime.workers.session_worker import GRADIENT_CASES, HAND_MADE, MORE_CASES, NUM_RANKS, write_inputs

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("shares_heads", [False, True], ids=["whole heads", "shared heads"])
@settings(max_examples=9)
@given(
    st.integers(1, 9),
    st.sampled_from(["iteration", "microbatch"]),
    st.sampled_from(get_args(Recompute)[:-1]),
    st.integers(0, 10**6),
)
def test_any_plan_gives_the_gradients_of_one_process_and_an_order_that_cannot_deadlock(
    tmp_path_factory: pytest.TempPathFactory,
    shares_heads: bool,
    num_ranks: int,
    sync: Sync,
    recompute: Recompute,
    seed: int,
) -> None:
    plan = tmp_path_factory.mktemp("plan") / "plan.parquet"
    drawn = random_steps(num_ranks, 2, sync=sync, seed=seed)
    steps = sharing_heads(drawn, seed=seed) if shares_heads else drawn
    write_plan(plan, steps, num_ranks=num_ranks, sync=sync)
    config = replace(tiny_config(plan), recompute=recompute)
    ranks, alone = replay_threads(plan, config), replay_alone(plan, config)
    for rank in ranks:
        assert_agrees(Case(), rank, alone)
    check_order({number: rank.operations for number, rank in enumerate(ranks)})


def hand_made(folder: Path) -> Path:
    return write_plan(folder / "plan.parquet", HAND_MADE, num_ranks=NUM_RANKS)


UNEQUAL = [Row([0, 1, 2], [20, 5]), Row([1, 2, 3], [9]), Row([0, 3], [16, 3]), Row([0, 1], [6]), Row([0], [4])]
IN_WAVES = [
    *(Row([0, 1, 2], [20, 5], 0), Row([3], [9], 0), Row([0, 3], [16, 3], 1), Row([1, 2], [6], 1)),
    *(Row([0, 1], [4], 2), Row([2, 3], [11, 2], 2), Row([0, 2], [8], 3), Row([1], [3], 3), Row([3], (), 3)),
]


@pytest.mark.parametrize(
    ("rows", "sync", "held"),
    [
        (UNEQUAL, "iteration", 99),
        (IN_WAVES, "microbatch", 99),
        (IN_WAVES, "microbatch", 1),
        ([row._replace(heads_degree=2 if len(row.ranks) == 2 else 1) for row in UNEQUAL], "iteration", 99),
    ],
)
def test_forwards_before_an_earlier_backward_keep_their_rings(
    tmp_path: Path, rows: list[Row], sync: Sync, held: int
) -> None:
    """All of them first, or, in waves, one more than backwards: F0 F1 B0 F2 B1 F3 B2 B3."""
    plan = write_plan(tmp_path / "plan.parquet", [rows, rows], num_ranks=NUM_RANKS, sync=sync)
    alone = replay_alone(plan, TinyConfig(recompute="full"))
    for rank in holding_back(plan, held):
        assert_agrees(Case(), rank, alone)


def test_a_backward_between_forwards_stops_a_job_whose_ranks_would_wait_for_each_other(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [UNEQUAL], num_ranks=NUM_RANKS)
    with pytest.raises(RunError) as stopped:
        holding_back(plan, 1)
    assert str(stopped.value) == (
        "step 0: the backward of an earlier micro-batch runs between the forwards of later ones; under sync iteration "
        "ranks have different numbers of them and would wait for each other: run each backward before the next "
        "forward, or all forwards first, or plan with 'fcp plan --sync microbatch'"
    )


def holding_back(plan: Path, held: int) -> list[Replayed]:
    """What ranks compute that hold back the backwards of so many micro-batches until the next forward has run."""
    config = TinyConfig(recompute="full")
    fetch = synthetic_tokens(plan, VOCAB_SIZE)

    def run(meeting: Meeting, rank: int) -> Replayed:
        session = thread_session(plan, fetch, meeting, rank)
        model = TinyLanguageModel(config, ring_attend)
        losses, gradients = [], []
        for step in session.steps(model):
            waiting: list[torch.Tensor] = []
            for microbatch in step:
                logits = model(microbatch.input_ids, microbatch.position_ids, microbatch.ring)
                waiting.append(microbatch.loss(logits))
                while len(waiting) > (0 if microbatch.is_last else held):
                    torch.autograd.backward(waiting.pop(0))
            losses.append(step.reduced_loss())
            gradients.append(take_gradient(model))
        return Replayed(losses=np.array(losses), gradients=np.stack(gradients))

    return run_ranks(NUM_RANKS, run)


def test_a_parameter_without_gradient_anywhere_keeps_none_and_with_one_somewhere_gets_the_sum(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [[Row([0], [4]), Row([1], [4])]], num_ranks=2)

    def run(meeting: Meeting, rank: int) -> tuple[Any, Any]:
        session = thread_session(plan, synthetic_tokens(plan, VOCAB_SIZE), meeting, rank)
        model = torch.nn.ParameterDict({"somewhere": torch.ones(3), "nowhere": torch.ones(3)})
        for step in session.steps(model):
            for _ in step:
                if rank == 0:
                    torch.autograd.backward(model["somewhere"].sum() * 5.0)
        return model["somewhere"].grad, model["nowhere"].grad

    for somewhere, nowhere in run_ranks(2, run):
        assert somewhere.tolist() == [5.0] * 3
        assert nowhere is None


def test_ranks_start_from_rank_0s_weights(tmp_path: Path) -> None:
    plan = hand_made(tmp_path)

    def run(meeting: Meeting, rank: int) -> Replayed:
        session = thread_session(plan, synthetic_tokens(plan, VOCAB_SIZE), meeting, rank)
        model = TinyLanguageModel(TinyConfig(), ring_attend, seed=rank)
        return gradients_on_rank(session, model, lambda mb: mb.loss(model(mb.input_ids, mb.position_ids)))

    alone = replay_alone(plan, TinyConfig(), seed=0)
    for rank in run_ranks(NUM_RANKS, run):
        assert_agrees(Case(), rank, alone)


def one_rank(folder: Path, rows: Sequence[Row] = (Row([0], [6, 4]),)) -> Session:
    plan = write_plan(folder / "plan.parquet", [rows, rows], num_ranks=1)
    return thread_session(plan, synthetic_tokens(plan, VOCAB_SIZE), Meeting(1), 0)


def pretend_attention(microbatch: LocalMicroBatch) -> None:
    microbatch.ring.attention_calls += 1


def run_through(step: Step) -> Step:
    for microbatch in step:
        pretend_attention(microbatch)
    return step


def test_a_step_counts_the_tokens_that_carry_a_loss_and_predicts_its_time(tmp_path: Path) -> None:
    step = next(one_rank(tmp_path).steps())
    assert (step.tokens, len(step), step.predicted_seconds, step.bound_seconds) == (8, 1, 10.0, 10.0)


def test_a_session_goes_on_after_the_last_step_whose_micro_batches_were_all_run(tmp_path: Path) -> None:
    first = one_rank(tmp_path)
    assert first.state_dict() == {"next_step": 0}
    for step in first.steps():
        for microbatch in step:
            assert first.state_dict() == {"next_step": 0}
            pretend_attention(microbatch)
        break
    assert next(first.steps()).index == 0  # a second loop begins where the first did, as that over held-out rows
    second = one_rank(tmp_path)
    second.load_state_dict(first.state_dict())
    assert next(second.steps()).index == 1
    assert next(second.steps(first_step=0)).index == 0
    with pytest.raises(
        RunError, match=r"has no next_step, but model, optimizer; save the result of session\.state_dict\(\)"
    ):
        second.load_state_dict({"model": {}, "optimizer": {}})


def test_a_requeued_job_whose_script_begins_again_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = one_rank(tmp_path)
    session.steps()
    assert "Slurm" not in capsys.readouterr().err
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    session.steps(first_step=1)
    assert "Slurm" not in capsys.readouterr().err
    session.steps()
    assert capsys.readouterr().err == (
        "fcp: Slurm has started this job before (SLURM_RESTART_COUNT 2), and it begins with step 0 again; a script that "
        "resumes loads its checkpoint first, with session.load_state_dict\n"
    )


class Dropping(torch.nn.Module):
    """A model with dropout as a module, and as the number that a function is given (as Seed-OSS has it)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.linear, self.drop, self.residual_dropout = torch.nn.Linear(2, 2), torch.nn.Dropout(rate), rate


def test_a_model_that_trains_with_dropout_is_said_to_differ_from_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(model: torch.nn.Module) -> str:
        for step in one_rank(tmp_path).steps(model):
            for microbatch in step:
                pretend_attention(microbatch)
                losses = model.get_parameter("linear.weight").sum() * torch.ones(1, 10, VOCAB_SIZE)
                microbatch.loss(losses).backward()  # type: ignore[no-untyped-call]
        return capsys.readouterr().err

    assert said(Dropping(0.1)) == (
        "fcp: warning: the model trains with dropout (residual_dropout is 0.1; 2 in all), whose random numbers are not "
        "those of one process: losses differ from its losses; set it to 0 to compare them\n"
    )
    assert said(Dropping(0.1).eval()) == ""
    assert said(Dropping(0.0)) == ""


def test_every_microbatch_is_timed(tmp_path: Path) -> None:
    step = next(one_rank(tmp_path, [Row([0], [3]), Row([0], [4])]).steps())
    first, second = run_through(step).timings
    assert (first.order, second.order) == (0, 1)
    assert first.start_seconds == 0.0
    assert 0.0 <= first.seconds <= second.start_seconds


class FullyShardedDataParallel(torch.nn.Linear):
    """As torch's, by name."""


MISUSES: dict[str, tuple[Callable[[Session], Any], str]] = {
    "steps that are only fetched": (
        lambda session: list(session.steps()),
        r"^step 0: the next step was fetched before any of its 1 micro-batches was run, as loaders do that",
    ),
    "a step that is iterated twice": (
        lambda session: list(run_through(next(session.steps()))),
        "step 0 was iterated twice",
    ),
    "a pack of several sequences without the hook, at degree 1 too": (
        lambda session: list(next(session.steps())),
        r"degree 1, 2 sequences: the model's forward never called fcp_cli.runtime.attention",
    ),
    "the loss of a step that has none": (
        lambda session: run_through(next(session.steps())).reduced_loss(),
        r"step 0 has no loss; compute it with microbatch.loss\(logits\)",
    ),
    "FSDP1": (
        lambda session: session.steps(FullyShardedDataParallel(2, 2)),
        r"shard the model with fully_shard \(FSDP2\)",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_a_session_is_not_for_stops_the_job(name: str, tmp_path: Path) -> None:
    misuse, message = MISUSES[name]
    with pytest.raises(RunError, match=message):
        misuse(one_rank(tmp_path))


def test_a_batch_in_which_nothing_carries_a_loss_has_loss_and_gradient_zero(tmp_path: Path) -> None:
    session = one_rank(tmp_path, [Row([0], [1, 1])])
    model = TinyLanguageModel(TinyConfig(), ring_attend)
    replayed = gradients_on_rank(session, model, lambda mb: mb.loss(model(mb.input_ids, mb.position_ids)))
    assert not replayed.losses.any()
    assert not replayed.gradients.any()


def test_a_session_without_data_says_so(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [[Row([0], [2])]], num_ranks=1)
    session = thread_session(plan, None, Meeting(1), 0)
    with pytest.raises(RunError, match="no data: pass fetch="):
        session.steps()


def test_without_a_plan_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FCP_PLAN", raising=False)
    with pytest.raises(RunError, match=r"no plan was given; pass plan=\.\.\., set FCP_PLAN"):
        plan_path(None)
    monkeypatch.setenv("FCP_PLAN", "from-launch.parquet")
    assert plan_path(None) == Path("from-launch.parquet")
    assert plan_path("given.parquet") == Path("given.parquet")


# One launch of four gloo ranks serves all tests below.


@cache
def gloo_job(*, full: bool) -> dict[str, list[Any]]:
    """Case -> what each rank left, of the examples or of what they cover."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        return run_worker("session_worker", Path(name), *(["full"] if full else []), num_ranks=NUM_RANKS)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in MORE_CASES else ()) for name in GRADIENT_CASES]
)
def test_gloo_ranks_compute_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    plan, case = GRADIENT_CASES[name]
    if case.family != "tiny":
        pytest.importorskip("transformers")
    write_inputs(tmp_path)
    alone = expected(case, tmp_path / plan)
    ranks = gloo_job(full=name in MORE_CASES)[name]
    assert len(ranks) == NUM_RANKS
    for rank in ranks:
        assert_agrees(case, rank, alone)


OTHERS = r"rank 2 cannot follow the plan"
# Name -> what every rank says, or what each does.
ERRORS: dict[str, str | list[str]] = {
    "eight ranks": r"the plan .* is for 8 ranks but 4 were launched; launch 8, or make a plan for 4 with: "
    r"fcp plan lengths.parquet --ranks 4 .* -o .*-4-ranks.parquet",
    "other plan": r"rank 2 has another plan than rank 0 under .* put one plan file where all ranks read it",
    "edited": [
        *(OTHERS, OTHERS),
        r"edited.parquet was edited: its content does not match its plan hash; make it again with: fcp plan ",
        OTHERS,
    ],
    "missing": [OTHERS, OTHERS, r"there is no plan .*missing.parquet", OTHERS],
    "own attention": r"step 0, micro-batch \d, degree 2, 1 sequences: the model's forward never called",
    "left early": r"step 0: 0 of 2 micro-batches were run; iterate each step to its end",
    "ddp with a hook": r"^the model's DistributedDataParallel has a communication hook .* under a plan gradients are summed",
    "ddp with a static graph": r"^the model's DistributedDataParallel has static_graph=True, .*: remove it, or give",
    "ddp that steps is not given": [
        rf"^step 0, micro-batch \d, rank {rank}: steps\(\) was given no model, so nothing sums the gradients of"
        for rank in range(4)
    ],
    "ddp that ignores a parameter": r"^the model's DistributedDataParallel has parameters that it ignores, which would",
    "fsdp over half": r"the parameter .* is sharded by FSDP2 over 2 of 4 ranks; give fully_shard a mesh of all ranks",
    "hsdp without names": r"^Please init the 2D mesh for HSDP with mesh_dim_names specified$",
    "fsdp of a part": r"only parts of the model are sharded with FSDP2; call fully_shard on the whole model too",
    "ddp beside a parameter": r"^the model's part inner is a DistributedDataParallel, which does not hold the parameter "
    r"head.weight and 1 more; wrap the whole model, or freeze them$",
    "composable ddp": r"^the model is a DDPTinyLanguageModel of torch, which reduces gradients by itself, and fcp does not "
    r"know when; give steps\(\) the model that it wraps, or wrap it in DistributedDataParallel or with fully_shard$",
    "data parallel": r"^the model is a DataParallel of torch, which reduces gradients by itself, and fcp does not know",
    "tensor parallel": r"^the parameter output.weight is a DTensor over 4 ranks that fully_shard did not make; a plan's "
    r"loop has no tensor parallelism: shard the model with fully_shard alone$",
    "fsdp divided twice": r"^FSDP2 divides the gradients of the model by 1 and those of blocks.0 by 4; call "
    r"set_gradient_divide_factor with one factor for all layers, or for none$",
    "fsdp1 of a part": r"^the model's part output is a FullyShardedDataParallel \(FSDP1\), which cannot follow a plan; "
    r"shard the model",
    "fsdp under iteration": r"^blocks.0 is sharded with FSDP2 and gathers its weights again for every micro-batch, .* "
    r"fully_shard\(..., reshard_after_forward=False\), or plan with 'fcp plan --sync microbatch'$",
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ERRORS)
def test_what_would_train_wrong_stops_every_rank_with_one_line(name: str) -> None:
    said = ERRORS[name]
    patterns = [said] * NUM_RANKS if isinstance(said, str) else said
    for message, pattern in zip(gloo_job(full=name in MORE_CASES)[name], patterns, strict=True):
        assert re.search(pattern, message), message
        assert "\n" not in message


def test_a_replayed_case_builds_what_it_says() -> None:
    """The thread and process tests mean nothing if the recomputation they ask for is off."""
    model, _ = build(Case(recompute="non-reentrant"))
    assert isinstance(model, TinyLanguageModel)
    assert model.recompute == "full"
