"""MB/s of counting the tokens of JSON lines: what limits a build, and its peers on the same files.

    python -m benchmarks.tokenizing [--megabytes N] [--peers PYTHON]
    python -m benchmarks.tokenizing --stream GIGABYTES

The texts are this package's own, drawn at random, and so is the tokenizer (BPE, 16,000 tokens) that is trained on
them. Rates are by processor time of all processes, which other work on the machine hardly changes, and by wall time.
PYTHON has `datatrove[io,processing]` and `datasets`. `--stream` serves JSON lines that lie nowhere by HTTP, and prints
the resident memory of the build that reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from fcp_cli.machine.host import usable_cores
from fcp_cli.reading.documents import decode_record

ROOT: Final = Path(__file__).parents[1]
_LINE_BYTES: Final = 4096
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
        build = [sys.executable, "-m", "fcp_cli", "manifest", "build", *map(str, paths)]
        build += ["--tokenizer", str(folder / "tokenizer.json"), "-o", str(folder / "m.parquet")]
        for processes in sorted({1, cores}):
            words = [*build, "--workers", str(processes)]
            report(f"fcp, {processes} processes", size, timed(lambda words=words: run(words)))  # type: ignore[misc]
        for peer, program in _PEERS.items() if peers else ():
            script = folder / "peer.py"
            settings = {"folder": name, "tokenizer": str(folder / "tokenizer.json"), "processes": cores}
            script.write_text(program.format(**settings))
            command = [str(peers), str(script)]
            report(f"{peer}, {cores} processes", size, timed(lambda command=command: run(command)))  # type: ignore[misc]


def _tokenize(file: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    for start in range(0, len(texts), 1024):
        tokenizer.encode_batch_fast(texts[start : start + 1024])


def stream(gigabytes: float) -> None:
    """Build a manifest of lines that a server makes up, and print the memory of the process as it goes on."""
    line = b'{"text": "' + b"x" * (_LINE_BYTES - 13) + b'"}\n'
    lines = int(gigabytes * 1e9) // _LINE_BYTES
    block = line * 512

    class Lines(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(0, lines * _LINE_BYTES, has_body=False)

        def do_GET(self) -> None:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            self.answer(int(first), int(last) + 1, has_body=True)

        def answer(self, start: int, stop: int, *, has_body: bool) -> None:
            if self.path != "/d.jsonl":
                self.send_error(404)
                return
            self.send_response(206 if has_body else 200)
            self.send_header("ETag", '"lines"')
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            while has_body and start < stop:
                at = start % _LINE_BYTES
                piece = block[at : at + stop - start]
                self.wfile.write(piece)
                start += len(piece)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Lines)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/d.jsonl"
    with tempfile.TemporaryDirectory() as name:
        command = [
            sys.executable,
            "-m",
            "fcp_cli",
            "-q",
            "manifest",
            "build",
            url,
            "--workers",
            "1",
            "-o",
            f"{name}/m.parquet",
        ]
        began = time.monotonic()
        with subprocess.Popen(command) as build:
            while build.poll() is None:
                time.sleep(5.0)
                print(f"{time.monotonic() - began:6.0f} s {_resident_mebibytes(build.pid):6.0f} MiB", flush=True)
        print(f"{gigabytes} GB, status {build.returncode}")


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
    options = parser.parse_args()
    if options.stream:
        stream(options.stream)
        return
    os.environ["RAYON_NUM_THREADS"] = "1"  # peers start a process per core, too
    compare(options.megabytes, options.peers)


if __name__ == "__main__":
    main()
