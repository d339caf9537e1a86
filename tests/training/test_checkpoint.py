from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from inline_snapshot import snapshot

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import Continuation
from fcp_cli.runs.checkpoint_header import CheckpointHeader, check_header, checkpoints, read_header
from fcp_cli.training.checkpoint import TrainState, load_checkpoint, saved_buffers, write_files
from fcp_cli.training.saving import CheckpointSaver, remove_leftovers
from fcp_cli.training.shares import Shares
from tests.launching.jobs import plan_metadata
from tests.messages import raises

pytestmark = pytest.mark.torch

HEADER = CheckpointHeader(
    step=5, plan_hash="a" * 64, num_ranks=1, sharding="replicated", model="tiny", torch=torch.__version__
)


class Made(NamedTuple):
    model: torch.nn.Module
    state: TrainState


def make(seed: int, width: int = 3) -> Made:
    """A small model with a tied weight, a buffer, and an optimizer that has made a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)
    )
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = TrainState(
        weights=dict(model.named_parameters()),
        buffers=saved_buffers(model),
        optimizer=optimizer,
        device=torch.device("cpu"),
        shares=Shares(),
    )
    return Made(model, state)


def save(folder: Path, state: TrainState, *, step: int = 5, keep: int = 2) -> Path:
    saver(folder, keep=keep).save(replace(HEADER, step=step), state)
    return folder / f"step-{step:08d}"


def saver(folder: Path, **changes: Any) -> CheckpointSaver:
    options: dict[str, Any] = {"rank": 0, "barrier": lambda: None, "keep": 2, "in_background": False, **changes}
    return CheckpointSaver(folder, **options)


def next_loss(made: Made) -> float:
    """One more step on random data: depends on weights, moments, buffers and the generator."""
    loss = made.model(torch.randn(4, 3)).pow(2).sum()
    torch.autograd.backward(loss)
    made.state.optimizer.step()
    return float(made.model(torch.ones(4, 3)).sum().detach())


def test_a_loaded_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    made = make(0)
    path = save(tmp_path, made.state)
    wanted = next_loss(made)
    other = make(1)
    load_checkpoint(path, other.state, header=HEADER, rank=0)
    assert next_loss(other) == wanted


def test_the_newest_are_kept(tmp_path: Path) -> None:
    state = make(0).state
    for step in (1, 2, 10):
        save(tmp_path, state, step=step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]
    assert read_header(checkpoints(tmp_path)[-1]).step == 10


@contextmanager
def small_disk(most_bytes: int = 1000) -> Iterator[None]:
    """No file may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    state = make(0).state
    before = save(tmp_path, state, step=1)
    with (
        small_disk(),
        raises(
            snapshot(
                "RunError: cannot write FOLDER/.step-00000002.partial/rng-00000.safetensors: Error while serializing: I/O error: File too large (os error 27); checkpoints before it are kept"
            )
        ),
    ):
        save(tmp_path, state, step=2)
    assert checkpoints(tmp_path) == [before]
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [before.name]


def test_a_damaged_checkpoint_says_how_to_go_on(tmp_path: Path) -> None:
    path = save(tmp_path, make(0).state)
    file = path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(
        RunError, match=r"state\.safetensors cannot be read .*; remove .*step-00000005 to resume from the one"
    ):
        load_checkpoint(path, make(1).state, header=HEADER, rank=0)


def test_code_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, make(0).state)
    torch.save({"model": {}, "optimizer": Path.cwd}, path / "state.safetensors")
    with pytest.raises(RunError, match="cannot be read"):
        load_checkpoint(path, make(1).state, header=HEADER, rank=0)


def test_a_checkpoint_of_another_model_does_not_fit(tmp_path: Path) -> None:
    path = save(tmp_path, make(0, width=4).state)
    with raises(snapshot("RunError: FOLDER/step-00000005 does not fit this model: 0.weight is (4, 4), not (3, 3)")):
        load_checkpoint(path, make(1).state, header=HEADER, rank=0)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing until the event is set."""
    ready = threading.Event()

    def write_later(*arguments: Any) -> None:
        assert ready.wait(60)
        write_files(*arguments)

    monkeypatch.setattr("fcp_cli.training.saving.write_files", write_later)
    yield ready
    ready.set()


def test_a_save_in_the_background_holds_what_was_there_when_it_began(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    made, saving = make(0), saver(tmp_path, in_background=True)
    saving.save(HEADER, made.state)
    wanted = next_loss(made)  # changes weights and moments in place
    assert saving.is_writing
    assert checkpoints(tmp_path) == []
    slow_disk.set()
    saving.finish()
    (path,) = checkpoints(tmp_path)
    other = make(1)
    load_checkpoint(path, other.state, header=HEADER, rank=0)
    assert next_loss(other) == wanted


def test_a_kill_during_a_save_in_the_background_leaves_the_one_before(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    slow_disk.set()
    before = save(tmp_path, make(0).state, step=1)
    slow_disk.clear()
    saver(tmp_path, in_background=True).save(HEADER, make(0).state)
    assert checkpoints(tmp_path) == [before]  # all that a process would find that starts now
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [before.name]


def test_the_next_save_waits_for_the_last(tmp_path: Path, slow_disk: threading.Event) -> None:
    state, saving = make(0).state, saver(tmp_path, in_background=True)
    saving.save(replace(HEADER, step=1), state)
    threading.Timer(0.1, slow_disk.set).start()
    saving.save(replace(HEADER, step=2), state)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]
    saving.finish()
    assert len(checkpoints(tmp_path)) == 2


def test_an_error_in_the_background_is_raised_at_the_next_step_and_names_the_file(tmp_path: Path) -> None:
    saving = saver(tmp_path, in_background=True)
    with small_disk():
        saving.save(HEADER, make(0).state)
        with raises(
            snapshot(
                "RunError: cannot write FOLDER/.step-00000005.partial/rng-00000.safetensors: Error while serializing: I/O error: File too large (os error 27); checkpoints before it are kept"
            )
        ):
            while saving.is_writing:
                pass
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"plan_hash": "b" * 64},
            snapshot(
                "RunError: step-00000005 was made under the plan aaaaaaaaaaaa, but this one is bbbbbbbbbbbb; resume with that plan, or start a new run without --resume"
            ),
        ),
        (
            {"num_ranks": 8},
            snapshot(
                "RunError: step-00000005 was made with num ranks 1, but this run has 8; start a new run without --resume"
            ),
        ),
        (
            {"model": "big"},
            snapshot(
                "RunError: step-00000005 was made with model tiny, but this run has big; start a new run without --resume"
            ),
        ),
    ],
)
def test_resuming_under_other_conditions_is_refused(change: dict[str, object], message: str) -> None:
    wanted = replace(HEADER, **change)  # type: ignore[arg-type]
    with raises(message):
        check_header(HEADER, wanted, plan_metadata(plan_hash=wanted.plan_hash), checkpoint=Path("step-00000005"))


def test_another_sharding_may_resume() -> None:
    wanted = replace(HEADER, sharding="sharded", shards=1)
    check_header(HEADER, wanted, plan_metadata(plan_hash=HEADER.plan_hash), checkpoint=Path("step-00000005"))


class Shared(NamedTuple):
    """What one rank's optimizer keeps of a model of two parameters, one of which has fewer rows than there are ranks."""

    parameters: list[torch.nn.Parameter]
    state: TrainState


def shared(whole: dict[str, torch.Tensor], shares: Shares) -> Shared:
    rows = {name: torch.nn.Parameter(tensor[shares.rows(len(tensor))]) for name, tensor in whole.items()}
    optimizer = torch.optim.AdamW(rows.values(), foreach=False)
    state = TrainState(weights=rows, buffers={}, optimizer=optimizer, device=torch.device("cpu"), shares=shares)
    return Shared(list(rows.values()), state)


def updated(whole: dict[str, torch.Tensor], shares: Shares) -> Shared:
    """The same after a step, whose gradients are the squares of the weights."""
    made = shared({name: tensor.clone() for name, tensor in whole.items()}, shares)
    for parameter in made.parameters:
        parameter.grad = parameter.detach().square()
    made.state.optimizer.step()
    return made


@pytest.mark.parametrize(("then", "now"), [(1, 3), (3, 1), (3, 3), (4, 3), (2, 4), (3, 2)])
def test_what_any_ranks_saved_any_others_cut_to_what_they_keep(tmp_path: Path, then: int, now: int) -> None:
    """As stages 0 (one share) and 1 to 3 save; bit for bit what would have been there, moments too."""
    whole = {"matrix": torch.randn(7, 3), "norm": torch.randn(2)}
    header = replace(HEADER, num_ranks=then, sharding="replicated" if then == 1 else "sharded", shards=then)
    partial = [updated(whole, Shares(index=index, count=then)).state for index in range(then)]

    def write_others() -> None:
        for rank, state in enumerate(partial[1:], start=1):
            saver(tmp_path, rank=rank).save(header, state)

    barriers: Iterator[Callable[[], None]] = iter([write_others, lambda: None, lambda: None])
    saver(tmp_path, barrier=lambda: next(barriers)()).save(header, partial[0])
    path = tmp_path / "step-00000005"
    for index in range(now):
        shares = Shares(index=index, count=now)
        loaded = shared({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, shares)
        load_checkpoint(path, loaded.state, header=header, rank=then)
        wanted = updated(whole, shares)
        for ours, theirs in zip(loaded.parameters, wanted.parameters, strict=True):
            assert torch.equal(ours, theirs)
            for name, moment in wanted.state.optimizer.state[theirs].items():
                assert torch.equal(loaded.state.optimizer.state[ours][name], moment)


def test_a_plan_that_goes_on_from_the_checkpoint_may_have_other_ranks_but_no_other_model() -> None:
    continues = Continuation(plan_hash=HEADER.plan_hash, num_ranks=1, first_step=5, trained="")
    wanted = replace(HEADER, plan_hash="b" * 64, num_ranks=3)
    plan = plan_metadata(plan_hash=wanted.plan_hash, num_ranks=3, continues=continues)
    check_header(HEADER, wanted, plan, checkpoint=Path("step-00000005"))
    with pytest.raises(RunError, match="was made with model tiny, but this run has big"):
        check_header(HEADER, replace(wanted, model="big"), plan, checkpoint=Path("step-00000005"))
    with pytest.raises(RunError) as error:
        path = Path("run/checkpoints/step-00000006")
        check_header(replace(HEADER, step=6), wanted, plan, checkpoint=path)
    assert str(error.value) == snapshot(
        "run/checkpoints/step-00000006 has finished 6 steps, but the plan bbbbbbbbbbbb continues from step 5; make it again with 'fcp plan --continue-from run --ranks 3'"
    )


def test_a_foreign_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text('{"format": "other/1"}')
    with raises(snapshot("RunError: FOLDER/checkpoint.json has format 'other/1'; this fcp reads 'fcp-checkpoint/2'")):
        read_header(tmp_path)
