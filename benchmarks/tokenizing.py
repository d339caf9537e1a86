"""MB/s of counting the tokens of JSON lines: what limits a build, and its peers on the same files.

    python -m benchmarks.tokenizing [--megabytes N] [--peers PYTHON]
    python -m benchmarks.tokenizing --stream GIGABYTES [--name d.jsonl.zst]

The texts are this package's own, drawn at random, and so is the tokenizer (BPE, 16,000 tokens) that is trained on
them. Rates are by processor time of all processes, which other work on the machine hardly changes, and by wall time. A
build without its start is what the last three quarters of the texts add to the first.
PYTHON has `datatrove[io,processing]` and `datasets`. `--stream` serves JSON lines that lie nowhere by HTTP, and prints
the resident memory of the build that reads them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.util.inputs import decode_record
from fcp_cli.util.machine import usable_cores

ROOT: Final = Path(__file__).parents[1]
_LINE_BYTES: Final = 4096
_BLOCK_LINES: Final = 512
_SAMPLE_SECONDS: Final = 2.0
_PEERS: Final = {
    "datatrove": """
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import TokensCounter
if __name__ == "__main__":
    reader = JsonlReader({folder!r}, glob_pattern="*.jsonl")
    steps = [reader, TokensCounter({tokenizer!r})]
    # Forked, so that the processor time of its processes is known.
    settings = {{"start_method": "fork", "logging_dir": {folder!r} + "/logs"}}
    LocalPipelineExecutor(steps, tasks={processes}, workers={processes}, **settings).run()
""",
    "datasets.map": """
import datasets
from tokenizers import Tokenizer
datasets.disable_progress_bars()
tokenizer = Tokenizer.from_file({tokenizer!r})
def count(batch):
    return {{"length": [len(one) for one in tokenizer.encode_batch_fast(batch["text"])]}}
if __name__ == "__main__":
    files, cache = {folder!r} + "/*.jsonl", {folder!r} + "/cache"
    data = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
    data.map(count, batched=True, num_proc={processes}, remove_columns=["text"])
""",
}


def write_corpus(folder: Path, megabytes: int, files: int) -> list[Path]:
    """Write a tokenizer, and texts of random length as JSON lines."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    sources = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("fcp_cli/**/*.py")])
    texts = [source.read_text(encoding="utf-8") for source in sources]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    draw = random.Random(0)
    paragraphs = [one for text in texts for one in text.split("\n\n") if len(one) > 40]
    paths = [folder / f"{number}.jsonl" for number in range(files)]
    for path in paths:
        with path.open("w") as stream:
            while stream.tell() < megabytes * 1_000_000 // files:
                count = min(int(draw.lognormvariate(1.2, 1.2)) + 1, 200)
                stream.write(json.dumps({"text": "\n\n".join(draw.choice(paragraphs) for _ in range(count))}) + "\n")
    return paths


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall and processor seconds of this process and of those that it waited for."""
    began, before = time.perf_counter(), _processor_seconds()
    work()
    return time.perf_counter() - began, _processor_seconds() - before


def _processor_seconds() -> float:
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


def report(name: str, megabytes: float, seconds: tuple[float, float]) -> None:
    wall, processor = seconds
    print(f"| {name} | {megabytes / processor:.2f} | {megabytes / wall:.2f} | {processor:.1f} |", flush=True)


def run(command: Sequence[str], *, seconds: float = 3600.0) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr[-800:]}")


def compare(megabytes: int, peers: str | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, cores = Path(name), usable_cores()
        paths = write_corpus(folder, megabytes, cores)
        size = sum(path.stat().st_size for path in paths) / 1e6
        print(f"{size:.0f} MB of JSON lines in {len(paths)} files\n")
        print("| work | MB/s of a core | MB/s | processor s |\n|---|---|---|---|")
        lines: list[bytes] = []
        report(
            "reading the lines", size, timed(lambda: lines.extend(b"".join(map(Path.read_bytes, paths)).splitlines()))
        )
        texts: list[str] = []
        report("parsing JSON", size, timed(lambda: texts.extend(decode_record(line)["text"] for line in lines)))
        report("tokenizer alone, one thread", size, timed(lambda: _tokenize(folder / "tokenizer.json", texts)))
        together = timed(partial(_tokenize_together, folder / "tokenizer.json", texts, cores))
        report(f"tokenizer alone, {cores} processes at a time", size, together)
        quarters = [folder / "quarters" / path.name for path in paths]
        quarters[0].parent.mkdir()
        for path, quarter in zip(paths, quarters, strict=True):
            part = path.read_bytes().splitlines(keepends=True)
            quarter.write_bytes(b"".join(part[: len(part) // 4]))
        more = size - sum(path.stat().st_size for path in quarters) / 1e6
        for processes in sorted({1, cores}):
            whole, first = (timed(partial(_build, folder, files, processes)) for files in (paths, quarters))
            report(f"fcp, {processes} processes", size, whole)
            report("  the same, without its start", more, (whole[0] - first[0], whole[1] - first[1]))
        for peer, program in _PEERS.items() if peers else ():
            script = folder / "peer.py"
            settings = {"folder": name, "tokenizer": str(folder / "tokenizer.json"), "processes": cores}
            script.write_text(program.format(**settings))
            command = [str(peers), str(script)]
            report(f"{peer}, {cores} processes", size, timed(lambda command=command: run(command)))  # type: ignore[misc]


def _build(folder: Path, files: Sequence[Path], processes: int) -> None:
    words = [
        "--tokenizer",
        str(folder / "tokenizer.json"),
        "--workers",
        str(processes),
        "-o",
        str(folder / "m.parquet"),
    ]
    run([sys.executable, "-m", "fcp_cli", "manifest", "build", *map(str, files), *words])


def _tokenize(file: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    for start in range(0, len(texts), 1024):
        tokenizer.encode_batch_fast(texts[start : start + 1024])


def _tokenize_together(file: Path, texts: list[str], processes: int) -> None:
    """Tokenize shares of the texts in forked processes, as many as fcp starts: cores may share what one had alone."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_tokenize, args=(file, texts[part::processes])) for part in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()


def stream(gigabytes: float, name: str) -> None:
    """Build a manifest of lines that a server makes up, and print the memory of the process as it goes on.

    Args:
        gigabytes: of text, unpacked.
        name: of the object; one that ends in `.zst` is frames of zstd.
    """
    text = "".join(random.Random(0).choices("etaoin shrdlu", k=_LINE_BYTES - 13))
    block = (json.dumps({"text": text}) + "\n").encode() * _BLOCK_LINES
    blocks = int(gigabytes * 1e9) // len(block)
    if name.endswith(".zst"):
        block = pa.Codec("zstd").compress(block, asbytes=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _repeating(f"/{name}", block, blocks))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/{name}"
    with tempfile.TemporaryDirectory() as folder:
        build = ["manifest", "build", url, "--workers", "1", "-o", f"{folder}/m.parquet"]
        began, found = time.monotonic(), list[float]()
        with subprocess.Popen([sys.executable, "-m", "fcp_cli", "-q", *build]) as process:
            while process.poll() is None:
                time.sleep(_SAMPLE_SECONDS)
                found.append(_resident_mebibytes(process.pid))
                print(f"{time.monotonic() - began:6.0f} s {found[-1]:6.0f} MiB", flush=True)
        rows = pq.read_metadata(f"{folder}/m.parquet").num_rows
    running = [each for each in found if each]
    quarters = [max(part) for part in np.array_split(running, 4)]
    print(f"{gigabytes:g} GB as {name}, {rows:,} lines of {blocks * _BLOCK_LINES:,}, status {process.returncode}")
    print("most MiB in each quarter of the time:", ", ".join(f"{most:.0f}" for most in quarters))


def _repeating(path: str, block: bytes, times: int) -> type[BaseHTTPRequestHandler]:
    """Return a handler that serves a block, again and again, as one object with ranges."""
    whole = block * 2

    class Repeating(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(0, times * len(block), has_body=False)

        def do_GET(self) -> None:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            self.answer(int(first), int(last) + 1, has_body=True)

        def answer(self, start: int, stop: int, *, has_body: bool) -> None:
            if self.path != path:
                self.send_error(404)
                return
            self.send_response(206 if has_body else 200)
            self.send_header("ETag", '"lines"')
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            while has_body and start < stop:
                at = start % len(block)
                piece = whole[at : at + min(stop - start, len(block))]
                self.wfile.write(piece)
                start += len(piece)

        def log_message(self, *arguments: object) -> None:
            pass

    return Repeating


def _resident_mebibytes(process: int) -> float:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--peers", help="Python with datatrove and datasets")
    parser.add_argument("--stream", type=float, help="gigabytes to read by HTTP")
    parser.add_argument("--name", default="d.jsonl", help="of what is read: d.jsonl or d.jsonl.zst")
    options = parser.parse_args()
    if options.stream:
        stream(options.stream, options.name)
        return
    os.environ["RAYON_NUM_THREADS"] = "1"  # peers start a process per core, too
    compare(options.megabytes, options.peers)


if __name__ == "__main__":
    main()
