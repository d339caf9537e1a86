"""How far a run got: the steps that its metrics cover, for --resume, and the plan to continue, for --continue-from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.plan.file import read_proven
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.checkpoints import check_plan_of, checkpoints, read_header
from fcp_cli.runs.metrics_reader import summary_of
from fcp_cli.runs.owner import refuse_running
from fcp_cli.runs.run_dir import Launched, RunPaths, followed_plan, from_here, read_launch
from fcp_cli.util.validation import shown


def recorded_steps(metrics: Path) -> int:
    """Return the number of finished steps according to the metrics; 0 without metrics."""
    last = summary_of(metrics).last
    return 0 if last is None else last["step"] + 1


def unrecorded(first: int, last: int) -> str:
    """Name a range of unrecorded steps, counted from 1 as in the progress display."""
    return f"step {last} is" if first == last else f"steps {first} to {last} are"


def require_recorded(checkpoint: Path, *, accepts: bool) -> None:
    """Check that the metrics record every step of the checkpoint.

    Args:
        checkpoint: the checkpoint to resume from.
        accepts: whether the user accepts a gap.
    """
    finished, paths = read_header(checkpoint).step, RunPaths(run_dir=checkpoint.parent.parent)
    recorded = recorded_steps(paths.metrics)
    if accepts or finished <= recorded:
        return
    late = [path for path in checkpoints(paths.checkpoints) if read_header(path).step > recorded]
    covered = [path.name for path in checkpoints(paths.checkpoints) if path not in late]
    again = f"from {covered[-1]}" if covered else "from the beginning"
    raise RunError(
        f"{from_here(checkpoint)} has finished {finished} steps, but {from_here(paths.metrics)} records {recorded}: "
        f"{unrecorded(recorded + 1, finished)} in no record; resume with --accept-unrecorded, or remove "
        f"{' and '.join(path.name for path in late)} to train them again {again}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """A run of the bundled trainer that stopped before the end of its plan.

    Attributes:
        plan: the latest plan it followed, verified.
        first_step: first untrained step: the one after its newest checkpoint.
        manifest: manifest of the plan.
        length_column: length column of the manifest.
        model: trained model.
    """

    plan: Path
    first_step: int
    manifest: Path
    length_column: str
    model: str


def plan_at_step(text: Path, manifest: Path | None, length_column: str) -> TrainedRun | None:
    """Parse PLAN@STEP, which names a script's run with a checkpoint at a plan step; None if it is another form.

    Raises:
        PlanError: the plan is missing, damaged or was edited.
        RunError: no manifest was given, or the plan has no such step.
    """
    name, _, step = str(text).rpartition("@")
    if not name or not step.isdecimal() or text.is_dir():
        return None
    if manifest is None:
        raise RunError(f"--continue-from {text} needs the plan's MANIFEST, or its --mix")
    metadata, first_step = read_proven(Path(name)), int(step)
    first, end = metadata.first_step, metadata.end_step
    if not max(first, 1) <= first_step < end:
        raise RunError(f"--continue-from {text}: the plan has steps {first} to {end - 1}; name one of them, from 1 on")
    return TrainedRun(plan=Path(name), first_step=first_step, manifest=manifest, length_column=length_column, model="")


def read_trained_run(run_dir: Path, *, manifest: Path | None = None) -> TrainedRun:
    """Read a run directory; `manifest` overrides the location of the plan's manifest."""
    refuse_running(run_dir)
    launched = read_launch(run_dir)
    if launched.training is None or launched.model is None:
        raise RunError(
            f"{run_dir} ran {' '.join(launched.program)}, whose checkpoints fcp cannot read; only runs of the "
            "bundled trainer can be continued"
        )
    plan = followed_plan(run_dir, launched)
    metadata = read_proven(plan)
    saved = checkpoints(RunPaths(run_dir=run_dir).checkpoints)
    if not saved:
        raise RunError(
            f"{run_dir} has no checkpoint, so its training is lost; plan again with 'fcp plan "
            f"{metadata.manifest.argument} --ranks N'"
        )
    header = read_header(saved[-1])
    check_plan_of(header, metadata, checkpoint=saved[-1])
    if header.step >= metadata.end_step:
        raise RunError(f"{run_dir} has finished all {header.step} steps of its plan: nothing is left to plan")
    return TrainedRun(
        plan=plan,
        first_step=header.step,
        manifest=_manifest(manifest, launched, plan, metadata),
        length_column=_length_column(run_dir, launched.training),
        model=launched.model,
    )


def _length_column(run_dir: Path, training: Mapping[str, Any]) -> str:
    column = training.get("length_column", "length")
    if not isinstance(column, str):
        path = RunPaths(run_dir=run_dir).launch
        raise RunError(f"{path} is damaged: training.length_column is {shown(column)}; it must be a text")
    return column


def _manifest(given: Path | None, launched: Launched, plan: Path, metadata: PlanMetadata) -> Path:
    if given is not None:
        return given
    if metadata.mixture is not None:
        raise RunError(f"{plan} mixes manifests; name each with --mix FILE:WEIGHT, with its weight from now on")
    name = metadata.manifest.name
    places = [*launched.manifests, Path(launched.plan).parent / name, plan.parent / name, Path(name)]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise RunError(
            f"{plan} was made from {name}, which is not next to it; name it: fcp plan {name} --continue-from ..."
        )
    return found
