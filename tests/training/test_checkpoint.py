from __future__ import annotations

import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from inline_snapshot import snapshot

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import Continuation
from fcp_cli.runs import checkpoints as files
from fcp_cli.runs.checkpoints import CheckpointHeader, FileSums, check_header, checkpoints, read_header, require_files
from fcp_cli.training.checkpoint import (
    CheckpointSaver,
    TrainState,
    load_checkpoint,
    remove_leftovers,
    write_files,
)
from fcp_cli.training.sharding import Shares
from fcp_cli.training.weights import saved_buffers
from tests.launching.jobs import plan_metadata
from tests.messages import raises, settled

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


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank to wait for or to hear from."""
    monkeypatch.setattr("fcp_cli.training.checkpoint.dist.barrier", lambda: None)
    monkeypatch.setattr("fcp_cli.training.checkpoint.gather_texts", lambda world, text: [text])


@pytest.fixture(autouse=True)
def without_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)


def saver(folder: Path, *, rank: int = 0, **changes: Any) -> CheckpointSaver:
    options: dict[str, Any] = {"keep": 2, "in_background": False, **changes}
    session: Any = SimpleNamespace(rank=rank, world=None)
    return CheckpointSaver(folder, session, **options)


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
    load_checkpoint(path, other.state, header=read_header(path), rank=0)
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
                "RunError: cannot write FOLDER/.step-00000002.partial/rng-00000.safetensors: File too large; the run can resume from step-00000001"
            )
        ),
    ):
        save(tmp_path, state, step=2)
    assert checkpoints(tmp_path) == [before]
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [before.name]


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << (place % 8)
    file.write_bytes(content)


def load(path: Path) -> None:
    load_checkpoint(path, make(1).state, header=read_header(path), rank=0)


def test_every_flipped_bit_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, make(0).state)
    files = sorted(path.iterdir())
    assert [file.name for file in files] == ["checkpoint.json", "rng-00000.safetensors", "state.safetensors"]
    for file in files:
        content = file.read_bytes()
        for place in range(0, len(content), 97):
            flip(file, place)
            with pytest.raises(RunError):
                load(path)
            file.write_bytes(content)
    load(path)


def test_a_damaged_file_is_named_with_what_was_saved_and_the_checkpoint_to_resume_from(tmp_path: Path) -> None:
    state = make(0).state
    for step in (4, 5, 6):
        save(tmp_path, state, step=step, keep=3)
    flip(tmp_path / "step-00000006" / "state.safetensors", 1001)
    (tmp_path / "step-00000005" / "rng-00000.safetensors").unlink()
    with pytest.raises(RunError) as error:
        load(tmp_path / "step-00000006")
    assert re.sub("[0-9a-f]{8}(?=,|;)", "CHECKSUM", settled(str(error.value))) == snapshot(
        "bytes 0 to 2,344 of FOLDER/step-00000006/state.safetensors have the checksum CHECKSUM, but were saved with CHECKSUM; remove FOLDER/step-00000005 and FOLDER/step-00000006 to resume from step-00000004"
    )


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a file cut short": lambda path: (path / "state.safetensors").write_bytes(bytes(500)),
    "a file missing": lambda path: (path / "state.safetensors").unlink(),
    "a file more": lambda path: (path / "rng-00001.safetensors").write_bytes(b"more"),
    "no header": lambda path: (path / "checkpoint.json").unlink(),
    "half a header": lambda path: (path / "checkpoint.json").write_text("{"),
}
DAMAGES_MESSAGES = snapshot(
    {
        "a file cut short": "RunError: FOLDER/step-00000005/state.safetensors has 500 bytes, but 2,344 were saved; no checkpoint before it is left: restore step-00000005 from a copy, or start a new run without --resume",
        "a file missing": "RunError: FOLDER/step-00000005/state.safetensors is missing or unreadable: No such file or directory; no checkpoint before it is left: restore step-00000005 from a copy, or start a new run without --resume",
        "a file more": "RunError: FOLDER/step-00000005/rng-00001.safetensors is not listed in checkpoint.json; no checkpoint before it is left: restore step-00000005 from a copy, or start a new run without --resume",
        "no header": "RunError: cannot read FOLDER/step-00000005/checkpoint.json: No such file or directory; no checkpoint before it is left: restore step-00000005 from a copy, or start a new run without --resume",
        "half a header": "RunError: FOLDER/step-00000005/checkpoint.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); no checkpoint before it is left: restore step-00000005 from a copy, or start a new run without --resume",
    }
)


@pytest.mark.parametrize("case", DAMAGES)
def test_a_checkpoint_of_other_files_is_refused_before_anything_starts(tmp_path: Path, case: str) -> None:
    path = save(tmp_path, make(0).state)
    DAMAGES[case](path)
    assert checkpoints(tmp_path) == [path]  # never silently an older one
    with raises(DAMAGES_MESSAGES[case]):
        require_files(path, read_header(path))


def test_a_damaged_chunk_is_found_by_the_rank_whose_share_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 200)
    path = save(tmp_path, make(0).state)
    header = read_header(path)
    sums = header.files["state.safetensors"]
    assert len(sums.crc32) == -(-sums.bytes // 200) > 5
    flip(path / "state.safetensors", sums.bytes - 1)
    last = len(sums.crc32) - 1
    found = []
    for rank in range(3):
        state = replace(make(1).state, shares=Shares(copy=rank))
        try:
            load_checkpoint(path, state, header=header, rank=rank, num_ranks=3)
        except RunError as error:
            found.append(rank)
            assert f"bytes {200 * last:,} to {sums.bytes:,} of" in str(error)
    assert found == [last % 3]


def test_saving_a_step_again_never_leaves_the_run_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make(0).state
    path = save(tmp_path, state)
    rename, seen = Path.rename, []

    def watched(source: Path, target: Path) -> Path:
        seen.append(len([one for one in tmp_path.iterdir() if (one / "checkpoint.json").is_file()]))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", watched)
    assert save(tmp_path, state) == path
    assert seen == [2, 2]
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_code_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, make(0).state)
    torch.save({"model": {}, "optimizer": Path.cwd}, path / "state.safetensors")
    sums = files.sums_of([memoryview((path / "state.safetensors").read_bytes())])
    header = replace(HEADER, files={"state.safetensors": sums})  # whoever puts code there can change its checksum, too
    with pytest.raises(RunError, match="cannot be read"):
        load_checkpoint(path, make(1).state, header=header, rank=0)


def test_a_checkpoint_of_another_model_does_not_fit(tmp_path: Path) -> None:
    path = save(tmp_path, make(0, width=4).state)
    with raises(snapshot("RunError: FOLDER/step-00000005 does not fit this model: 0.weight is (4, 4), not (3, 3)")):
        load_checkpoint(path, make(1).state, header=read_header(path), rank=0)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing until the event is set."""
    ready = threading.Event()

    def write_later(*arguments: Any) -> dict[str, FileSums]:
        assert ready.wait(60)
        return write_files(*arguments)

    monkeypatch.setattr("fcp_cli.training.checkpoint.write_files", write_later)
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
    load_checkpoint(path, other.state, header=read_header(path), rank=0)
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


@pytest.mark.parametrize("does", ["a start", "a save"])
def test_nothing_is_removed_or_written_where_a_strange_link_leads(tmp_path: Path, does: str) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / ".step-00000001.partial").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "others")
    with pytest.raises(RunError, match="this run did not write"):
        if does == "a start":
            remove_leftovers(tmp_path / "checkpoints")
        else:
            save(tmp_path / "checkpoints", make(0).state, step=1)
    assert [path.name for path in (tmp_path / "others").iterdir()] == [".step-00000001.partial"]


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
                "RunError: cannot write FOLDER/.step-00000005.partial/rng-00000.safetensors: File too large; the run has no checkpoint yet"
            )
        ):
            while saving.is_writing:
                pass
    assert checkpoints(tmp_path) == []


OTHERS: dict[str, dict[str, object]] = {
    "another plan": {"plan_hash": "b" * 64},
    "other ranks": {"num_ranks": 8},
    "another model": {"model": "big"},
}
OTHERS_MESSAGES = snapshot(
    {
        "another plan": "RunError: step-00000005 was made under the plan aaaaaaaaaaaa, but this one is bbbbbbbbbbbb; resume with that plan, or start a new run without --resume",
        "other ranks": "RunError: step-00000005 was made with num ranks 1, but this run has 8; start a new run without --resume",
        "another model": "RunError: step-00000005 was made with model tiny, but this run has big; start a new run without --resume",
    }
)


@pytest.mark.parametrize("case", OTHERS)
def test_resuming_under_other_conditions_is_refused(case: str) -> None:
    wanted = replace(HEADER, **OTHERS[case])  # type: ignore[arg-type]
    with raises(OTHERS_MESSAGES[case]):
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
def test_what_any_ranks_saved_any_others_cut_to_what_they_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: int, now: int
) -> None:
    """As stages 0 (one share) and 1 to 3 save; bit for bit what would have been there, moments too."""
    whole = {"matrix": torch.randn(7, 3), "norm": torch.randn(2)}
    header = replace(HEADER, num_ranks=then, sharding="replicated" if then == 1 else "sharded", shards=then)
    partial = [updated(whole, Shares(index=index, count=then)).state for index in range(then)]

    told: list[str] = []

    def gather(world: object, text: str) -> list[str]:
        told.append(text)
        return told

    def write_others() -> None:
        for rank, state in enumerate(partial[1:], start=1):
            saver(tmp_path, rank=rank).save(header, state)

    saves_others: list[Callable[[], None]] = [write_others]  # once rank 0 has emptied the folder
    monkeypatch.setattr(
        "fcp_cli.training.checkpoint.dist.barrier", lambda: saves_others.pop()() if saves_others else None
    )
    monkeypatch.setattr("fcp_cli.training.checkpoint.gather_texts", gather)
    saver(tmp_path).save(header, partial[0])
    path = tmp_path / "step-00000005"
    header = read_header(path)
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
    with raises(snapshot("RunError: FOLDER/checkpoint.json has format 'other/1'; this fcp reads 'fcp-checkpoint/3'")):
        read_header(tmp_path)
