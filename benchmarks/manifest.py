"""Seconds and peak memory of building and reading a manifest of 10 M rows: `python -m benchmarks.manifest`.

The sources are a Megatron index (lengths alone), a Parquet column of lengths and JSON lines of short texts, written
to a temporary folder first. Each step runs in a process of its own, so that its peak memory is its own; `import` is
what Python and pyarrow take before anything is read.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.sources.detect import SourceOptions, detect_kind, open_source
from fcp_cli.manifest.summary import summarize
from fcp_cli.manifest.tokens import open_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--jsonl-rows", type=int, default=1_000_000, help="JSON lines are parsed one by one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _measured("import", lambda: None, 0)
        _run(lambda: _write_sources(root, options.rows, options.jsonl_rows))
        for name, rows in (("d.idx", options.rows), ("d.parquet", options.rows), ("d.jsonl", options.jsonl_rows)):
            manifest = root / f"{name}.manifest.parquet"
            _measured(f"build from {name}", lambda name=name, manifest=manifest: _build(root / name, manifest), rows)  # type: ignore[misc]
            _measured("  read lengths", lambda manifest=manifest: _read(manifest), rows)  # type: ignore[misc]
            _measured("  summarize", lambda manifest=manifest: _summarize(manifest), rows)  # type: ignore[misc]
        _measured("open tokens of d.jsonl, read 1000", lambda: _tokens(root / "d.jsonl.manifest.parquet"), 1000)


def _write_sources(root: Path, rows: int, jsonl_rows: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(7.0, 1.5, rows), 1, 1 << 20).astype(np.int32)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, rows, 1)
    (root / "d.idx").write_bytes(header + lengths.tobytes() + bytes(8 * rows + 8))
    pq.write_table(pa.table({"length": lengths}), root / "d.parquet")
    with (root / "d.jsonl").open("w") as stream:
        for length in lengths[:jsonl_rows]:
            stream.write('{"text": "' + "x" * min(int(length), 200) + '"}\n')


def _build(source: Path, manifest: Path) -> None:
    build_manifest(open_source(source, detect_kind(source), SourceOptions()), manifest)


def _read(manifest: Path) -> None:
    read_manifest(manifest)


def _summarize(manifest: Path) -> None:
    summarize(read_manifest(manifest))


def _tokens(manifest: Path) -> None:
    reader = open_tokens(manifest)
    for row in np.random.default_rng(1).integers(0, len(read_manifest(manifest)), 1000):
        reader(int(row))


def _measured(name: str, work: Callable[[], None], rows: int) -> None:
    seconds, peak_mebibytes = _run(work)
    print(f"{name:36} {rows:>12,} rows {seconds:8.2f} s {peak_mebibytes:8.0f} MiB peak")


def _run(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds and peak resident MiB of `work` in a forked process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def target() -> None:
        start = time.perf_counter()
        work()
        sender.send((time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))

    process = context.Process(target=target)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"a step failed with status {process.exitcode}")
    result: tuple[float, float] = receiver.recv()
    return result


if __name__ == "__main__":
    main()
