"""What fcp hooks or relies on in transformers and accelerate is looked for before it is hooked."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face import hooks, trainer
from fcp_cli.integrations.hugging_face.hooks import hook_trainer
from fcp_cli.integrations.hugging_face.trainer import following

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
import accelerate.accelerator
import transformers.trainer

pytestmark = pytest.mark.hf

_PACKAGES: tuple[tuple[ModuleType, Callable[[ModuleType], None], Any, str], ...] = (
    (transformers.trainer, hook_trainer, hooks.TRAINER, f"transformers {transformers.__version__}"),
    (
        accelerate.accelerator,
        hooks.hook_accelerator,
        hooks.ACCELERATOR,
        f"accelerate {accelerate.__version__}",
    ),
)
_TARGETS = [
    pytest.param(module, hook, path, parameters, found, id=path)
    for module, hook, targets, found in _PACKAGES
    for path, parameters in targets.items()
]


@pytest.mark.parametrize(("module", "hook", "path", "parameters", "found"), _TARGETS)
def test_without_what_is_hooked_one_line_names_it_the_version_and_the_remedy(
    module: ModuleType,
    hook: Callable[[ModuleType], None],
    path: str,
    parameters: tuple[str, ...],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, method = path.split(".")

    def refusal_with(changed_method: Any) -> str:
        stand_in = class_with(getattr(module, kind), method, changed_method)
        before = dict(vars(stand_in))
        with monkeypatch.context() as changed, pytest.raises(RunError) as refused:
            changed.setattr(module, kind, stand_in)
            hook(module)
        assert vars(stand_in) == before  # nothing is hooked before everything was found
        return str(refused.value)

    remedy = re.escape("; versions known to work: ") + r"\d[\d.]+; pip install \w+==\d[\d.]+"
    target = f"{module.__name__}.{path}"
    assert re.fullmatch(re.escape(f"{found} has no {target}") + remedy, refusal_with(None))
    for name in parameters:
        others = taking([other for other in parameters if other != name])
        assert re.fullmatch(re.escape(f"{found}: {target} takes no {name}") + remedy, refusal_with(others))


def class_with(kind: Any, method: str, other: Any) -> Any:
    """What a class offers, with another method, or none, in place of one."""
    offered = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("__")}
    return SimpleNamespace(**{name: found for name, found in {**offered, method: other}.items() if found is not None})


def taking(parameters: list[str]) -> Any:
    """A function that takes these parameters alone."""
    found: Any = lambda *given: None  # noqa: E731
    found.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in parameters])
    return found


@pytest.mark.parametrize(("module", "hook", "targets", "found"), _PACKAGES, ids=["transformers", "accelerate"])
def test_everything_that_is_hooked_is_looked_for(
    module: ModuleType, hook: Callable[[ModuleType], None], targets: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = next(iter(targets)).split(".")[0]
    stand_in = class_with(getattr(module, kind), "", None)
    before = dict(vars(stand_in))
    with monkeypatch.context() as changed:
        changed.setattr(module, kind, stand_in)
        hook(module)
    hooked = {f"{kind}.{name}" for name, own in before.items() if getattr(stand_in, name) is not own}
    assert len(hooked) > 3
    assert hooked <= set(targets)


def test_metrics_and_plan_are_whole_before_a_stopped_rank_ends_with_the_signals_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that has ended has the others killed, and rank 0 may still be writing."""
    events: list[str] = []

    class Follower:
        def __init__(self, trainer: object, plan: object) -> None:
            self.stop = self

        def leave(self) -> None:
            events.append("leave")

        def end(self) -> None:
            events.append("end")
            raise SystemExit(130)

        def close(self) -> None:
            events.append("close")

    monkeypatch.setattr(trainer, "TrainerFollower", Follower)

    with pytest.raises(SystemExit), following(SimpleNamespace()):
        events.append("train")

    assert events == ["train", "leave", "end", "close"]


def test_a_saved_model_is_recorded_by_the_first_rank_in_the_trainers_folder_or_the_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {path.split(".")[1]: taking(list(names)) for path, names in hooks.TRAINER.items()}
    kind = type("Trainer", (), methods)
    hook_trainer(SimpleNamespace(Trainer=kind, __name__="transformers.trainer"))  # type: ignore[arg-type]
    monkeypatch.setenv("FCP_RUN_DIR", str(tmp_path))
    for rank, folder in ((0, tmp_path / "best"), (0, None), (1, tmp_path / "of another rank")):
        trainer: Any = kind()
        trainer.args = SimpleNamespace(output_dir=str(tmp_path / "out"))
        trainer.is_world_process_zero = partial(bool, rank == 0)
        trainer.save_model(folder)
    assert (tmp_path / "saved.txt").read_text().splitlines() == [str(tmp_path / "best"), str(tmp_path / "out")]
