"""A build as a list of parts in a folder, which engines count anywhere and which are merged in the end.

A part is found by its content: the source, the versions of its files, the tokenizer and its place among the parts. One
that lies there is not counted again.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from fcp_cli.errors import FcpError
from fcp_cli.files import replaced_atomically
from fcp_cli.manifest.parts import counted_rows, divisible, part_identity, write_part
from fcp_cli.manifest.sources.base import DivisibleSource, Part, Source
from fcp_cli.words import first_line, ranges

_PARTS_OF_A_TASK: Final = 32  # of 8 MiB each: minutes of a tokenizer, so that starting a task is no matter
MOST_SHARDS: Final = {"ray": 10_000, "slurm": 1_000}
"""Shards unless more are asked for; Slurm's default limit of an array is 1,001 tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFolder:
    """Parts of a build.

    Attributes:
        path: their folder.
        source: the whole source.
        count: number of parts.
    """

    path: Path
    source: DivisibleSource
    count: int

    def file(self, index: int) -> Path:
        return self.path / f"part-{index + 1}-of-{self.count}.parquet"

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(map(self.file, range(self.count)))

    def missing(self) -> list[Part]:
        """Return the parts that are not there, or are there of another content."""
        identity = part_identity(self.source, Part(0, self.count))
        parts = (Part(index, self.count) for index in range(self.count))
        return [part for part in parts if counted_rows(self.file(part.index), identity, part) is None]


def part_folder(source: Source, output: Path, engine: str, shards: int | None) -> PartFolder:
    """Return the folder of the parts of a manifest, which is made next to it.

    Args:
        source: the whole source.
        output: the manifest.
        engine: `ray` or `slurm`.
        shards: number of parts; None: one per 256 MiB of text.
    """
    whole = divisible(source)
    path = output.absolute().with_name(f"{output.name}.parts")
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise FcpError(f"cannot make the folder {path}: {error.strerror}") from error
    usual = min(-(-whole.parts // _PARTS_OF_A_TASK), MOST_SHARDS[engine])
    return PartFolder(path=path, source=whole, count=shards or usual)


def count_on_ray(
    folder: PartFolder, parts: Sequence[Part], reopen: Callable[[], Source], address: str | None
) -> Iterator[Part]:
    """Count parts in tasks of Ray; yields each once its file is written here.

    Ray runs a task again whose worker or node is gone. Results travel through its object store, so that nodes need
    not share a file system for them.

    Args:
        folder: receives the parts.
        parts: the parts to be counted.
        reopen: opens the whole source on any node.
        address: the address of a cluster, as `ray://HOST:PORT`; None: the one that Ray finds, else one on this machine.
    """
    try:
        import ray
    except ImportError as error:
        raise FcpError("--on ray needs Ray: pip install 'ray>=2.9'") from error
    ray.init(address=address, log_to_driver=False, configure_logging=False, include_dashboard=False)
    try:
        task, opened = ray.remote(_counted_part), ray.put(pickle.dumps(reopen))
        waiting = {task.remote(opened, part): part for part in parts}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            part = waiting.pop(done)
            with replaced_atomically(folder.file(part.index)) as temporary:
                temporary.write_bytes(ray.get(done))
            yield part
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, FcpError):
            raise cause from error
        raise FcpError(
            f"Ray lost a part: {first_line(cause or error)}; the same command counts what is missing"
        ) from error
    finally:
        ray.shutdown()


def _counted_part(reopen: bytes, part: Part) -> bytes:
    os.environ["RAYON_NUM_THREADS"] = "1"  # Ray gives a task one core
    source = _reopened(reopen)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "part.parquet"
        write_part(source, source.only(part), part, path, advance=lambda done: None)
        return path.read_bytes()


@lru_cache(maxsize=1)
def _reopened(reopen: bytes) -> DivisibleSource:
    """Open a source once for all tasks that a worker process runs."""
    return divisible(pickle.loads(reopen)())


def array_of(parts: Sequence[Part]) -> str:
    """Return the numbers of parts, from 1, as Slurm's `--array` takes them: 1-3,7."""
    return ranges(part.index + 1 for part in parts)
