"""What decoding real pictures costs a run, and what its processes hold: steps on real pixels against made-up ones.

    python -m benchmarks.pixels

First one process decodes JPEG files of several sizes alone. Then files of the sizes of the made-up data set `mixed`,
scaled as the demo scales them, are trained on by the tiny Qwen3-VL on the ranks of this machine: with pixels that are
made up, and decoded by the checkpoint's image processor in the trainer's own thread or in processes. Runs take turns,
so that what else the machine does falls on all alike; a run's figure is the median of its steps without the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clips import Scale, write_media_records
from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.detect import SourceOptions, open_source
from fcp_cli.manifest.tokens import open_pictures
from fcp_cli.training.decoding import PixelPool, Wanted
from fcp_cli.training.weights import model_config
from tests.manifest.chat_checkpoint import write_checkpoint
from tests.manifest.picture_checkpoint import MARKS, QWEN_TEMPLATE

MODEL = "qwen3-vl-tiny"
_SIZES = ((256, 256), (720, 1280), (1536, 2048))
_MEBIBYTE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="0: only decode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", help="only these, as 'frozen encoder' 'frozen and cached'")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_checkpoint(folder / "checkpoint")
        _decode_alone(folder)
        if arguments.steps:
            _train(folder, arguments)


def _train(folder: Path, arguments: argparse.Namespace) -> None:
    """Print the seconds of a step on made-up and on real pixels."""
    _write_data(folder, arguments.rows)
    _plan(folder, "real", arguments.ranks)
    _plan(folder, "sizes", arguments.ranks)
    frozen = ("--decode-workers", "0", "--freeze-vision")
    cases = {
        "made up": ("sizes", ("--weights", "random")),
        "trainer's thread": ("real", ("--decode-workers", "0")),
        "one process": ("real", ("--decode-workers", "1")),
        "frozen encoder": ("real", frozen),
    }
    if arguments.cases:
        cases = {case: cases[case] for case in arguments.cases}
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(arguments.rounds):
        for case, (data, words) in cases.items():
            run = f"{case}-{number}".replace(" ", "-")
            seconds[case].append(_median_step(folder, run, data, arguments, words))
    print(f"{MODEL}, {arguments.ranks} ranks on CPUs, {arguments.steps} steps, median of {arguments.rounds} runs each")
    for case, found in seconds.items():
        each = ", ".join(f"{one:.3f}" for one in found)
        print(f"{case:18} {statistics.median(found):.3f} s a step ({each})", flush=True)


def _write_checkpoint(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    loader: Any = AutoTokenizer
    images: Any = Qwen2VLImageProcessorPil
    family: Any = AutoModelForImageTextToText
    write_checkpoint(folder, QWEN_TEMPLATE)
    tokenizer = loader.from_pretrained(folder, extra_special_tokens=MARKS["qwen3_vl"])
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS["qwen3_vl"].values())})
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 16_777_216}
    images(patch_size=16, size=sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(folder)
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "temporal_patch_size": 2, "size": sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    config = model_config(MODEL)
    for name, token in (("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>")):
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    family.from_config(config).save_pretrained(folder)


def _write_data(folder: Path, rows: int) -> None:
    """Write pictures, conversations about them, and their sizes alone with as many tokens of text."""
    write_media_records(folder / "all.jsonl", "mixed", rows, seed=0, scale=Scale(short_side=64))
    drawn = [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()]
    real, sizes, number, draw = [], [], 0, np.random.default_rng(0)
    for record in drawn:
        names = []
        for image in record.get("images") or []:
            _write_jpeg(folder / f"{number}.jpg", image["height"], image["width"], draw)
            names.append(f"{number}.jpg")
            number += 1
        words = min(record["text_tokens"], 400)
        real.append({"images": names, "caption": "a" * words})
        sizes.append({"text_tokens": words + 16, "images": record.get("images") or []})
    for name, records in (("real", real), ("sizes", sizes)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        options = SourceOptions(processor=str(folder / "checkpoint"))
        build_manifest(open_source(folder / f"{name}.jsonl", "media", options), folder / f"{name}.parquet")


def _write_jpeg(path: Path, height: int, width: int, draw: np.random.Generator) -> None:
    from PIL import Image

    small = draw.integers(0, 256, (max(height // 8, 1), max(width // 8, 1), 3)).astype(np.uint8)
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)


def _plan(folder: Path, name: str, ranks: int) -> None:
    words = ["--ranks", str(ranks), "--tokens-per-rank", "2048", "--global-batch-size", "32", "--epochs", "8"]
    _fcp(folder, "plan", f"{name}.parquet", "--model", MODEL, *words, "-o", f"{name}.plan.parquet")


def _median_step(folder: Path, run: str, data: str, arguments: argparse.Namespace, more: tuple[str, ...]) -> float:
    words = ["--plan", f"{data}.plan.parquet", "--model", "checkpoint", "--manifest", f"{data}.parquet"]
    words += ["--steps", str(arguments.steps), "--device", "cpu", "--run-dir", run]
    _fcp(folder, "launch", *words, *more)
    records = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    steps = [float(record["seconds"]) for record in records if record["kind"] == "step" and record["step"]]
    return statistics.median(steps)


def _fcp(folder: Path, *words: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "fcp_cli", *words], cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr)


def _decode_alone(folder: Path) -> None:
    """Print pictures a second of one process, and the memory that it took at its peak."""
    draw = np.random.default_rng(1)
    for height, width in _SIZES:
        count = max(4, int(40 * 65_536 / (height * width)))
        names = [f"{height}-{number}.jpg" for number in range(count)]
        for name in names:
            _write_jpeg(folder / name, height, width, draw)
        (folder / "alone.jsonl").write_text("".join(json.dumps({"image": n, "caption": ""}) + "\n" for n in names))
        options = SourceOptions(processor=str(folder / "checkpoint"))
        build_manifest(open_source(folder / "alone.jsonl", "media", options), folder / "alone.parquet")
        rows = open_pictures(folder / "alone.parquet")
        assert rows is not None
        pool = PixelPool(rows.folder, rows.processor, workers=1)
        executor: Any = pool._pool
        try:
            found = [rows.read(row) for row in range(count)]
            wanted = [
                Wanted(picture=o.pictures[0], size=o.sizes[0], visual=o.visuals[0], ranges=((0, o.visuals[0].patches),))
                for o in found
            ]
            pool.begin(wanted[0])()
            started = _peak_bytes(next(iter(executor._processes)))
            begin, cpu = time.perf_counter(), _cpu_seconds(next(iter(executor._processes)))
            for wait in [pool.begin(one) for one in wanted]:
                wait()
            elapsed = time.perf_counter() - begin
            worker = next(iter(executor._processes))
            used = _cpu_seconds(worker) - cpu
            peak = f"{_peak_bytes(worker) / _MEBIBYTE:.0f} MiB at its peak ({started / _MEBIBYTE:.0f} after one)"
            each = f"{1e3 * elapsed / count:.0f} ms each, {1e3 * used / count:.0f} ms of a core"
            patches = found[0].visuals[0].patches
            print(f"JPEG {height} x {width}: {patches:,} patches, {each}; the process holds {peak}", flush=True)
        finally:
            pool.close()


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    main()
