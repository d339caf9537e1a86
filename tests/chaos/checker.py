"""What must be true of a run's records, whatever happened to it. Reads its files alone, not through fcp's own readers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FACTS = ("loss", "tokens", "grad_norm", "learning_rate")

Layout = Mapping[str, Sequence[Sequence[int]]]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A run that nothing happened to, and the plan that it followed.

    Attributes:
        facts: [steps] loss, tokens, gradient norm and learning rate.
        layouts: [steps] rank, as text -> order, degree and tokens of each of its micro-batches, by the plan.
        states: name of a checkpoint -> digest of its weights, optimizer and random generators.
        may_lose: records that a kill may lose: a script saves inside its step, which is recorded only then.
    """

    facts: Sequence[Sequence[Any]]
    layouts: Sequence[Layout]
    states: Mapping[str, str]
    may_lose: int = 0

    @property
    def steps(self) -> int:
        return len(self.facts)


def read_reference(run_dir: Path, layouts: Sequence[Layout], *, may_lose: int = 0) -> Reference:
    """Return what other runs are compared with, from the folder of a run that went straight to its end."""
    records, problems = _step_records(run_dir / "metrics.jsonl")
    assert not problems, problems
    return Reference(
        facts=[_facts_of(record) for record in records],
        layouts=layouts,
        states={path.name: digest_of(path) for path in whole_checkpoints(run_dir)},
        may_lose=may_lose,
    )


def problems_of(
    run_dir: Path, reference: Reference, *, finished: bool, exact_steps: int | None = None, rounding: float = 0.0
) -> list[str]:
    """Return what is wrong with the records of a run, one line each.

    Args:
        run_dir: of the run.
        reference: to compare with.
        finished: all steps must be there; else as many as the newest checkpoint has, which a resumed run begins with.
        exact_steps: steps on the reference's ranks, which are equal in every bit; None: all.
        rounding: relative difference that later ones may have, on other ranks.
    """
    records, problems = _step_records(run_dir / "metrics.jsonl")
    saved = whole_checkpoints(run_dir)
    newest = max((int(path.name.rpartition("-")[2]) for path in saved), default=0)
    steps = [record["step"] for record in records]
    wanted = reference.steps if finished else newest
    problems += _order_problems(steps, wanted, reference.may_lose)
    for record in records:
        if record["step"] < reference.steps:
            is_exact = exact_steps is None or record["step"] < exact_steps
            problems += _step_problems(record, reference, None if is_exact else rounding)
    for path in saved:
        step = int(path.name.rpartition("-")[2])
        if exact_steps is not None and step > exact_steps:
            continue
        if digest_of(path) != reference.states.get(path.name):
            problems.append(f"{path.name} is not the undisturbed run's, bit for bit")
    if finished and newest != reference.steps:
        problems.append(f"the newest checkpoint is of step {newest}, not {reference.steps}")
    return problems


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of checkpoints; of Trainer's, too, whose state is the last file that rank 0 writes."""
    found = (run_dir / "checkpoints").glob("[!.]*-*/*.json")
    return sorted(path.parent for path in found if path.name in ("checkpoint.json", "trainer_state.json"))


def digest_of(checkpoint: Path) -> str:
    """Return the digest of all tensors that a checkpoint holds."""
    found = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def _step_records(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of steps, and what is wrong with lines; the last one may be cut short by a kill."""
    if not path.exists():
        return [], []
    *lines, last = path.read_text(encoding="utf-8").split("\n")
    records, problems = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            problems.append(f"{path.name} line {number} is not JSON: {line[:60]!r}")
            continue
        if record.get("kind") == "step":
            records.append(record)
    del last
    return records, problems


def _facts_of(record: dict[str, Any]) -> list[Any]:
    return [record[name] for name in _FACTS]


def _order_problems(steps: list[int], wanted: int, may_lose: int) -> list[str]:
    problems = []
    twice = sorted({step for step in steps if steps.count(step) > 1})
    missing = sorted(set(range(max([wanted, *(step + 1 for step in steps)]))) - set(steps))
    if twice:
        problems.append(f"steps {twice} are recorded twice")
    if len(missing) > may_lose:
        problems.append(f"steps {missing} are recorded nowhere, although the run is past them")
    if not twice and len(missing) <= may_lose and steps != sorted(steps):
        problems.append(f"steps are out of order: {steps}")
    return problems


def _step_problems(record: dict[str, Any], reference: Reference, rounding: float | None) -> list[str]:
    """Compare a step with the reference's; `rounding`: on other ranks, whose micro-batches are not the plan's."""
    step = record["step"]
    problems = []
    for name, found, wanted in zip(_FACTS, _facts_of(record), reference.facts[step], strict=True):
        if found != wanted and (rounding is None or not _is_near(found, wanted, rounding)):
            problems.append(f"step {step}: {name} is {found!r}, the undisturbed run has {wanted!r}")
    layout = {
        str(rank["rank"]): [[m["order"], m["degree"], m["tokens"]] for m in rank["micro_batches"]]
        for rank in record["ranks"]
    }
    if rounding is None and layout != reference.layouts[step]:
        problems.append(f"step {step}: ranks ran {layout}, the plan has {reference.layouts[step]}")
    return problems


def _is_near(found: Any, wanted: Any, rounding: float) -> bool:
    return isinstance(found, float) and abs(found - wanted) <= rounding * abs(wanted)
