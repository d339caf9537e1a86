"""Runs a measurement on this machine and turns its samples into a cost profile.

The samples file outlives whatever happens: a worker that dies or a Ctrl-C leaves it, and the next run goes on from it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fcp_cli.cost.fitting import LEAST_SAMPLES
from fcp_cli.errors import ProfileError
from fcp_cli.machine.processes import kill_tree
from fcp_cli.machine.torchrun import torchrun_argv
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.profiling.points import measurement_points, vision_points
from fcp_cli.profiling.request import Request
from fcp_cli.profiling.samples import FORMAT, Point, SamplesFile, VisionPoint, append_line, read_samples

_POLL_SECONDS = 0.2
# After its budget a worker still measures the step and memory; beyond this it hangs.
_GRACE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings:
    """What is measured on what.

    Attributes:
        model: name or path, as `load_model` takes it.
        cluster: name that the profile gives; its figures stand in for what cannot be measured here.
        ranks: processes on all nodes, one per device or core; 1 emulates degrees above 1.
        nodes: machines; with several, rings across nodes are measured too.
        degrees: to measure.
        max_length: tokens of the longest sequence and pack.
        device: `cpu`, `cuda` or `npu`.
        dtype: `float32` or `bfloat16` (autocast).
        layers: layer counts to measure with; see `Request`.
        budget_seconds: for observations, beside the start of the processes.
        samples: file that keeps what is measured.
        vision_layers: block counts of the vision encoder to measure with; none where the model has none.
    """

    model: str
    cluster: str
    ranks: int
    nodes: int = 1
    degrees: tuple[int, ...]
    max_length: int
    device: str
    dtype: str
    layers: tuple[int, ...]
    budget_seconds: float
    samples: Path
    vision_layers: tuple[int, ...] = ()

    @property
    def emulate(self) -> bool:
        return self.ranks == 1

    def header(self) -> dict[str, Any]:
        """The first line of the samples file: a run may only add to samples of the same header."""
        spec = asdict(load_model(self.model))
        return {
            "format": FORMAT,
            "model": self.model,
            "cluster": self.cluster,
            "figures": {key: value for key, value in spec.items() if key not in ("sources", "aliases")},
            "ranks": self.ranks,
            "nodes": self.nodes,
            "emulate": self.emulate,
            "degrees": list(self.degrees),
            "max_length": self.max_length,
            "device": self.device,
            "dtype": self.dtype,
            "layers": list(self.layers),
            **({"vision_layers": list(self.vision_layers)} if self.vision_layers else {}),
        }


def default_degrees(ranks: int, most: int = 8) -> tuple[int, ...]:
    """Degrees to measure: all up to 4, then 6 and 8; what one rank emulates where it is alone."""
    reach = ranks if ranks > 1 else most
    return tuple(degree for degree in (1, 2, 3, 4, 6, 8) if degree <= reach)


def default_layers(spec: ModelSpec, *, device: str, memory_bytes: float) -> tuple[int, ...]:
    """The whole model where its training state fits half of the memory, else two counts to extrapolate from."""
    if 16 * spec.text_parameters <= memory_bytes / 2:
        return (spec.num_layers,)
    return (1, 2) if device == "cpu" else (2, min(6, spec.num_layers))


def default_vision_layers(spec: ModelSpec, layers: Sequence[int], *, device: str) -> tuple[int, ...]:
    """The whole vision encoder where the whole language model is measured, else two counts; none without an encoder.

    The deepstack mergers lie behind the first blocks, so that both counts have all of them.
    """
    if spec.vision is None:
        return ()
    least = max(1, len(spec.vision.deepstack_layers))
    most = min(least + (1 if device == "cpu" else 4), spec.vision.depth)
    return (spec.vision.depth,) if len(layers) == 1 or least == most else (least, most)


def prepare_samples(settings: MeasureSettings, *, fresh: bool) -> bool:
    """Begin a samples file, or find one to go on with; true if it is resumed. One with enough points is begun anew.

    Raises:
        ProfileError: the file holds samples of something else.
        UsageError: `max_length` leaves too few lengths.
    """
    header = settings.header()
    points_of(header)  # complains before anything is written
    path = settings.samples
    if path.exists() and not fresh:
        samples = read_samples(path)
        if not samples.finished or fitted_points(samples) < LEAST_SAMPLES:
            _require_same(header, samples.header, path)
            append_line(path, {"kind": "resumed"})
            return True
    try:
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"cannot write the samples {path}: {error.strerror or error}") from error
    return False


def fitted_points(samples: SamplesFile) -> int:
    """How many of the points that a fit may use were observed."""
    seen = {line["point"] for line in samples.of_kind("observation")}
    return sum(point.key in seen and not point.held_out for point in points_of(samples.header))


def _require_same(wanted: Mapping[str, Any], found: Mapping[str, Any], path: Path) -> None:
    different = sorted(key for key in wanted if json.loads(json.dumps(wanted[key])) != found.get(key))
    if different:
        key = different[0]
        raise ProfileError(
            f"{path} holds an unfinished measurement with another {key} ({_short(found.get(key))}, not "
            f"{_short(wanted[key])}); finish that one, or begin anew with --fresh"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def run_measurement(settings: MeasureSettings, *, on_progress: Callable[[float, int], None]) -> SamplesFile:
    """Run the workers until they finish; `on_progress` is told elapsed seconds and observations so far.

    Raises:
        ProfileError: a worker died; what was measured is kept in the samples file.
    """
    with tempfile.TemporaryDirectory(prefix="fcp-profile-") as folder:
        request = Path(folder) / "request.json"
        worker_request(settings).write(request)
        log = Path(folder) / "worker.log"
        status = _run(worker_argv(settings.ranks, request), settings, log, on_progress)
        samples = read_samples(settings.samples)
        if not samples.finished:
            kept = len(samples.of_kind("observation"))
            raise ProfileError(
                f"the measurement's worker ended early (status {status}): {_reason(log)}; {kept} observations are kept "
                f"in {settings.samples}: run the command again to go on, or add --from-samples {settings.samples}"
            )
    return samples


def worker_request(settings: MeasureSettings) -> Request:
    """The request file's content."""
    return Request(
        model=str(Path(settings.model).resolve()) if Path(settings.model).exists() else settings.model,
        layers=settings.layers,
        points=tuple(points_of(settings.header())),
        samples=settings.samples.resolve(),
        budget_seconds=settings.budget_seconds,
        device=settings.device,
        dtype=settings.dtype,
        emulate=settings.emulate,
        vision_points=tuple(vision_points_of(settings.header())),
        vision_layers=settings.vision_layers,
    )


def worker_argv(ranks: int, request: Path) -> list[str]:
    """torchrun on this machine, as a module of this interpreter."""
    return [*torchrun_argv(ranks), "-m", "fcp_cli.profiling.worker", str(request)]


def cluster_command(settings: MeasureSettings, request: Path, *, master: str) -> str:
    """What to run on every node of a cluster, with NODE_RANK set to 0, 1, ...; the request lies on shared storage."""
    meeting = [f"--nnodes={settings.nodes}", f"--master-addr={master}", "--master-port=29500"]
    words = torchrun_argv(settings.ranks // settings.nodes, python="python", options=meeting)
    tail = ["-m", "fcp_cli.profiling.worker", str(request.resolve())]
    return f'{shlex.join(words)} --node-rank="$NODE_RANK" {shlex.join(tail)}'


def _run(
    argv: Sequence[str], settings: MeasureSettings, log: Path, on_progress: Callable[[float, int], None]
) -> int | None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if settings.device == "cpu" else dict(os.environ)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env=environment)
    try:
        while process.poll() is None:
            elapsed = time.monotonic() - began
            if elapsed > settings.budget_seconds + _GRACE_SECONDS:
                break
            on_progress(elapsed, _observations(settings.samples))
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
        return process.returncode
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


def _observations(path: Path) -> int:
    return max(0, path.read_bytes().count(b'"observation"'))


def _reason(log: Path) -> str:
    """The last line of a traceback that names an error, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line and "elastic" not in line]
    return (errors or lines or ["it printed nothing"])[-1][:300]


def points_of(header: Mapping[str, Any]) -> list[Point]:
    """The points of a measurement, from the first line of its samples: rings inside nodes, then across them."""
    max_length, nodes = int(header["max_length"]), int(header["nodes"])
    degrees = [int(degree) for degree in header["degrees"]]
    if nodes == 1:
        return measurement_points(max_length, degrees)
    inside = [degree for degree in degrees if degree <= int(header["ranks"]) // nodes]
    across = [degree for degree in degrees if degree > 1]
    return [
        *measurement_points(max_length, inside),
        *measurement_points(max_length, across, crosses_nodes=True),
    ]


def vision_points_of(header: Mapping[str, Any]) -> list[VisionPoint]:
    """The calls of the vision encoder of a measurement; none where there was none, or where it was not measured."""
    if not header.get("vision_layers"):
        return []
    # A call runs as many patches as a pack has tokens at most; InternVL's tiles all have one size.
    return vision_points(int(header["max_length"]), mixed=header["figures"]["vision"]["kind"] == "qwen3_vl")
