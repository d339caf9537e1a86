"""Seconds and peak memory of building and reading a manifest of 10 M rows: `python -m benchmarks.manifest`.

The sources are a Megatron index (lengths alone), a Parquet column of lengths and JSON lines of short texts, written
to a temporary folder first. Each step runs in a process of its own, so that its peak memory is its own; `import` is
what Python and pyarrow take before anything is read. `--pictures N` measures headers of images instead, by processor
time.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import resource
import statistics
import struct
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.detect import SourceOptions, detect_kind, open_source
from fcp_cli.manifest.media import read_media
from fcp_cli.manifest.read import read_manifest, summarize
from fcp_cli.manifest.tokens import open_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--jsonl-rows", type=int, default=1_000_000, help="JSON lines are parsed one by one")
    parser.add_argument("--pictures", type=int, help="measure headers of so many pictures alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.pictures:
            _headers(root, options.pictures)
            return
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


def _headers(root: Path, pictures: int) -> None:
    """Print pictures per second of processor time whose sizes are read, as files and in a tar."""
    _write_pictures(root, pictures)
    for name in ("d.json", "d.tar"):
        rates = []
        for _ in range(5):
            began = time.process_time()
            found = sum(len(one.record["images"]) for one in read_media(root / name))
            rates.append(found / (time.process_time() - began))
        print(f"{name:8} {found:,} pictures, {statistics.median(rates):8,.0f} a second of a core")


def _write_pictures(root: Path, pictures: int) -> None:
    """Write files of 8 KiB, every second a PNG and the others JPEGs, with a list of them, and a tar of the same."""
    draw = random.Random(0)
    with tarfile.open(root / "d.tar", "w") as tar:
        for number in range(pictures):
            height, width = draw.randint(100, 4000), draw.randint(100, 4000)
            png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII5B", 13, b"IHDR", width, height, 8, 2, 0, 0, 0)
            segments = {
                0xE0: b"JFIF\0" + bytes(9),
                0xDB: bytes(65),
                0xC0: struct.pack(">BHH", 8, height, width) + bytes(10),
            }
            segments |= {0xC4: bytes(29), 0xDA: bytes(10)}
            jpeg = b"\xff\xd8" + b"".join(
                struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content for marker, content in segments.items()
            )
            name, content = (f"{number:07}.png", png) if number % 2 else (f"{number:07}.jpg", jpeg)
            content = content.ljust(8192, b"\1")
            (root / name).write_bytes(content)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    names = sorted(path.name for path in root.glob("*.[jp][pn]g"))
    (root / "d.json").write_text(json.dumps([{"id": name, "image": name, "text_tokens": 1} for name in names]))


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
