"""Headers of a run's checkpoints. Does not import torch: `fcp plan` and `fcp launch` read headers, too."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.util.inputs import open_input, read_object, require_input
from fcp_cli.util.machine import usable_cores
from fcp_cli.util.validation import Count, NonNegativeCount, shown, validated

FORMAT = "fcp-checkpoint/3"
PREFIX = "step-"
_NAME: Final = re.compile(rf"{PREFIX}[0-9]{{1,19}}")

Sharding = Literal["replicated", "sharded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointHeader:
    """Facts that must match the run before a checkpoint is loaded, and how the checkpoint is sharded.

    Attributes:
        sharding: whether rank 0 saved everything, or each rank of a replica its shard.
        shards: number of shards.
        files: checksums by file name.
    """

    step: NonNegativeCount
    plan_hash: str
    num_ranks: Count
    sharding: Sharding
    model: str
    torch: str
    shards: Count = 1
    files: Mapping[str, FileSums] = field(default_factory=dict)

    def text(self) -> str:
        """Return the content of `checkpoint.json`, including its checksum."""
        document = {"format": FORMAT, **asdict(self)}
        return json.dumps({**document, "checksum": _checksum(document)}, indent=1) + "\n"


def _checksum(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first. A checkpoint gets its name only once complete."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir())


def read_header(checkpoint: Path) -> CheckpointHeader:
    """Read the header of a checkpoint."""
    try:
        return _read(checkpoint)
    except _DamagedHeaderError as error:
        raise RunError(f"{error}; {way_back(checkpoint)}") from error


class _DamagedHeaderError(RunError):
    """The header is damaged, but an earlier checkpoint may be intact."""


def _read(checkpoint: Path) -> CheckpointHeader:
    path = checkpoint / "checkpoint.json"
    try:
        require_input(path, seekable=True)  # excludes pipes, which would block
    except OSError as error:
        raise _DamagedHeaderError(f"cannot read {path}: {error.strerror or error}") from error
    document = read_object(path, error=_DamagedHeaderError)
    found = document.get("format")
    if found != FORMAT:
        raise RunError(f"{path} has format {shown(found)}; this fcp reads {FORMAT!r}")
    if document.pop("checksum", None) != _checksum(document):
        raise _DamagedHeaderError(f"{path} does not match its checksum: it was damaged or edited")
    del document["format"]
    return validated(document, CheckpointHeader, where=f"{path} is damaged", error=_DamagedHeaderError)


def require_files(checkpoint: Path, header: CheckpointHeader) -> None:
    """Check that exactly the files of a checkpoint exist, with their sizes, without reading them."""
    wrong = wrong_size(checkpoint, header.files)
    if wrong is None:
        extra = sorted({path.name for path in checkpoint.glob("*.safetensors")} - header.files.keys())
        wrong = f"{checkpoint / extra[0]} is not listed in checkpoint.json" if extra else None
    if wrong is not None:
        raise RunError(f"{wrong}; {way_back(checkpoint)}")


def way_back(checkpoint: Path) -> str:
    """Suggest how to resume when a checkpoint is damaged: from the newest earlier one whose files exist."""
    for before in reversed([path for path in checkpoints(checkpoint.parent) if path.name < checkpoint.name]):
        try:
            header = _read(before)
        except RunError:
            continue
        if wrong_size(before, header.files) is None:
            later = [path for path in checkpoints(checkpoint.parent) if before.name < path.name]
            return f"remove {' and '.join(map(str, later))} to resume from {before.name}"
    return (
        f"no checkpoint before it is left: restore {checkpoint.name} from a copy, or start a new run without --resume"
    )


def kept_before(folder: Path) -> str:
    """Say which checkpoint remains if writing the next one to `folder` fails."""
    saved = checkpoints(folder)
    return f"the run can resume from {saved[-1].name}" if saved else "the run has no checkpoint yet"


def check_header(header: CheckpointHeader, wanted: CheckpointHeader, plan: PlanMetadata, *, checkpoint: Path) -> None:
    """Raise RunError if plan, number of ranks or model differ; a plan may continue another plan.

    Sharding may differ: each rank slices its shard from the saved tensors.

    Args:
        header: header of the checkpoint.
        wanted: header that the run would save.
        plan: plan of the resumed run.
        checkpoint: its path, for messages.
    """
    check_plan_of(header, plan, checkpoint=checkpoint)
    same_plan = header.plan_hash == plan.plan_hash
    for name in ("num_ranks", "model") if same_plan else ("model",):
        then, now = getattr(header, name), getattr(wanted, name)
        if then != now:
            raise RunError(
                f"{checkpoint} was made with {name.replace('_', ' ')} {then}, but this run has {now}; "
                "start a new run without --resume"
            )


def check_unfinished(place: Path, run_dir: Path, finished: int, *, last_step: int, end_step: int) -> None:
    """Raise RunError if a run has no steps left.

    Args:
        place: the run or its checkpoint, for the message.
        finished: number of finished steps.
        last_step: step at which this start would stop.
        end_step: end of the plan.
    """
    if finished < last_step:
        return
    if finished < end_step:
        more = f"give a larger --steps; the plan has {end_step}"
    else:
        more = (
            f"the plan ends there; for more, plan again, and start a new run without --resume{_from_weights(run_dir)}"
        )
    raise RunError(f"{place} has finished {finished} of {last_step} steps: nothing to resume; {more}")


def _from_weights(run_dir: Path) -> str:
    """Suggest how a new run can start from the trained weights, if the run saved a full model, not adapters."""
    weights = RunPaths(run_dir=run_dir).model
    return f" and with --weights {weights}" if (weights / "config.json").is_file() else ""


def check_plan_of(header: CheckpointHeader, plan: PlanMetadata, *, checkpoint: Path) -> None:
    """Check that a checkpoint was made under this plan, or that the plan continues from its step."""
    if header.plan_hash == plan.plan_hash:
        return
    continues = plan.continues
    if continues is None or continues.plan_hash != header.plan_hash:
        raise RunError(
            f"{checkpoint} was made under the plan {header.plan_hash[:12]}, but this one is {plan.plan_hash[:12]}; "
            f"resume with that plan, or start a new run without --resume{_from_weights(checkpoint.parent.parent)}"
        )
    if continues.first_step != header.step:
        raise RunError(
            f"{checkpoint} has finished {header.step} steps, but the plan {plan.plan_hash[:12]} continues from step "
            f"{continues.first_step}; make it again with 'fcp plan --continue-from {checkpoint.parent.parent} --ranks "
            f"{plan.num_ranks}'"
        )


# Checksums of checkpoint files: CRC-32 per chunk, so that ranks can share the verification of a file.
#
# CRC-32 detects corruption by disks and copies at several GB/s per core. It does not protect against tampering.

CHUNK_BYTES: Final = 64 << 20
_READ_BYTES: Final = 4 << 20
_MOST_THREADS: Final = 8  # more threads would outrun any disk or network


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSums:
    """Size and checksums of a file.

    Attributes:
        bytes: size of the file.
        crc32: CRC-32 of each chunk of `CHUNK_BYTES`; the last chunk may be shorter.
    """

    bytes: NonNegativeCount
    crc32: tuple[NonNegativeCount, ...]


def sums_of(pieces: Iterable[memoryview]) -> FileSums:
    """Return the checksums of a file whose content is the concatenation of `pieces`."""
    size, found, running = 0, [], 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = piece[start : start + CHUNK_BYTES - size % CHUNK_BYTES]
            running = zlib.crc32(part, running)
            start, size = start + len(part), size + len(part)
            if size % CHUNK_BYTES == 0:
                found.append(running)
                running = 0
    if size % CHUNK_BYTES:
        found.append(running)
    return FileSums(bytes=size, crc32=tuple(found))


def wrong_size(folder: Path, files: Mapping[str, FileSums]) -> str | None:
    """Describe the first file that is missing or has another size, or return None."""
    for name, sums in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{folder / name} is missing or unreadable: {error.strerror or error}"
        if size != sums.bytes:
            return f"{folder / name} has {size:,} bytes, but {sums.bytes:,} were saved"
    return None


def damage(folder: Path, files: Mapping[str, FileSums], *, index: int = 0, count: int = 1) -> str | None:
    """Verify a share of the chunks; describe the first corrupt or missing file, or return None.

    Args:
        folder: the folder of the files.
        files: checksums by file name.
        index, count: verify share `index` of `count`, so that ranks divide the work.
    """
    if (wrong := wrong_size(folder, files)) is not None:
        return wrong
    chunks = [(folder / name, chunk, saved) for name, sums in files.items() for chunk, saved in enumerate(sums.crc32)]
    threads = usable_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ThreadPoolExecutor(max(1, min(_MOST_THREADS, threads))) as pool:
        found = pool.map(_damaged_chunk, *zip(*islice(chunks, index, None, count), strict=True)) if chunks else ()
        return next((line for line in found if line is not None), None)


def _damaged_chunk(path: Path, chunk: int, saved: int) -> str | None:
    start = chunk * CHUNK_BYTES
    try:
        found, size = _chunk_sum(path, start)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if found == saved:
        return None
    place = f"bytes {start:,} to {start + size:,} of {path}"
    return f"{place} have the checksum {found:08x}, but were saved with {saved:08x}"


def _chunk_sum(path: Path, start: int) -> tuple[int, int]:
    running, left = 0, CHUNK_BYTES
    with open_input(path) as file:
        file.seek(start)
        while left and (piece := file.read(min(left, _READ_BYTES))):
            running, left = zlib.crc32(piece, running), left - len(piece)
    return running, CHUNK_BYTES - left
