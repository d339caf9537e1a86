"""Seconds from typing to the first step of a Trainer script: under torchrun, and launched by fcp without a plan.

    python -m benchmarks.first_step

A tiny Qwen3 on CPU ranks over gloo, and rows of a data set on disk, as `datasets.load_from_disk` opens them. Both start
in turns; of each the least of several starts counts, in waiting seconds and in processor seconds of all its processes,
which a busy machine lengthens less. fcp's caches of lengths are empty every time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fcp_cli.util.processes import descendants, torchrun_argv

_MARK = "first step done"


def start(argv: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Start a job, end it after its first step; return waiting and processor seconds until then."""
    began = time.perf_counter()
    job = subprocess.Popen(
        argv,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None
    shown = []
    for line in job.stdout:
        shown.append(line)
        if _MARK in line:
            break
    waited, busy = time.perf_counter() - began, _processor_seconds(job.pid)
    os.killpg(job.pid, signal.SIGTERM)
    job.stdout.read()
    job.wait()
    if _MARK not in "".join(shown):
        raise SystemExit(f"the job ended before its first step:\n{''.join(shown[-20:])}")
    return waited, busy


def _processor_seconds(process: int) -> float:
    """Return the seconds that a process, its descendants and their ended children have computed."""
    ticks = 0
    for one in (process, *descendants(process)):
        try:
            fields = Path(f"/proc/{one}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended; its parent counts it
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(_SCRIPT)
        subprocess.run([sys.executable, "-c", _MAKE_DATASET, str(options.rows)], cwd=folder, check=True)
        ways = {
            "torchrun": [*torchrun_argv(options.ranks), "train.py"],
            "fcp launch": [sys.executable, "-m", "fcp_cli", "launch", "--ranks", str(options.ranks), "--", "train.py"],
        }
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(options.starts):
            for way, argv in ways.items():
                environment = {"XDG_CACHE_HOME": str(folder / f"cache-{turn}"), "OMP_NUM_THREADS": "1"}
                found[way].append(start(argv, folder, environment))
    for way, measured in found.items():
        waited, busy = (min(one) for one in zip(*measured, strict=True))
        print(f"{way:<12} {waited:7.1f} s to the first step, {busy:7.1f} s of processor time")


_MAKE_DATASET = """
import sys
import numpy as np
from datasets import Dataset

random = np.random.default_rng(0)
lengths = random.lognormal(4.5, 1.0, int(sys.argv[1])).astype(np.int64).clip(4, 512)
rows = [random.integers(1, 127, length).tolist() for length in lengths]
Dataset.from_dict({"input_ids": rows, "labels": rows}).save_to_disk("data")
"""

_SCRIPT = f"""
from datasets import load_from_disk
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers import Trainer, TrainerCallback, TrainingArguments
import torch


class Mark(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 1 and args.process_index == 0:
            print({_MARK!r}, flush=True)


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    def padded(name, value):
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
    labels = padded("labels", -100)
    return {{"input_ids": padded("input_ids", 0), "labels": labels, "attention_mask": (labels >= 0).long()}}


config = Qwen3Config(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8)
arguments = TrainingArguments("out", per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no",
                              disable_tqdm=True)
Trainer(model=Qwen3ForCausalLM(config), args=arguments, train_dataset=load_from_disk("data"), data_collator=collate,
        callbacks=[Mark()]).train()
"""

if __name__ == "__main__":
    main()
