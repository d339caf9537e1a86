"""Training part of the demo: a tiny new checkpoint is trained on the sources of Python's standard library.

Runs the commands that a user would type in the demo folder. fcp settings from the environment or fcp.yaml are ignored.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcp_cli.demo.paced import without_settings
from fcp_cli.errors import RunError
from fcp_cli.reading.documents import decode_json
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.metrics.metrics_reader import read_metrics

RANKS, STEPS = 4, 5
_VOCABULARY, _TEXTS = 1024, 20
_DATA = ["--include", "[a-e]*.py", "--exclude", "test", "--exclude", "site-packages", "--exclude", "encodings"]
_SIZES = {"ranks": RANKS, "ranks-per-node": RANKS, "tokens-per-rank": 512, "global-batch-size": 8, "max-length": 2048}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoLosses:
    """First and last loss, and the largest gradient difference from a single process, in fp64."""

    first_loss: float
    last_loss: float
    gradient_difference: float


def train(folder: Path, say: Callable[[str], None]) -> DemoLosses:
    """Create a checkpoint, build a manifest, plan, verify and train; `say` is called with each command."""
    make_checkpoint(folder / "model")

    def fcp(*words: str) -> str:
        say(shlex.join(words))
        return run_fcp(folder, *words, *(["--json"] if words[0] == "verify" else []))

    library = sysconfig.get_paths()["stdlib"]
    fcp("manifest", "build", library, *_DATA, "--tokenizer", "model", "-o", "lengths.parquet")
    sizes = [word for name, value in _SIZES.items() for word in (f"--{name}", str(value))]
    where = ["--model", "model", "--cluster", "this-machine"]
    fcp("plan", "lengths.parquet", *where, *sizes, "--overlong", "drop", "--steps", str(STEPS), "-o", "plan.parquet")
    difference = gradient_difference(fcp("verify", "--plan", "plan.parquet", "--steps", "2"))
    rate = ["--learning-rate", "1e-2", "--warmup-steps", "1"]
    fcp("launch", "--model", "model", "--plan", "plan.parquet", "--run-dir", "run", *rate)
    metrics = RunPaths(run_dir=folder / "run").metrics
    losses = [float(record["loss"] or "nan") for record in read_metrics(metrics) if record["kind"] == "step"]
    return DemoLosses(first_loss=losses[0], last_loss=losses[-1], gradient_difference=difference)


def gradient_difference(document: str) -> float:
    """Return the largest gradient difference in the output of `fcp verify --json`."""
    return max(float(step["gradient_difference"]) for step in decode_json(document)["steps"])


def run_fcp(folder: Path, *words: str) -> str:
    """Run `fcp` quietly in a folder and return its standard output."""
    command = [sys.executable, "-m", "fcp_cli", "--no-config", "-q", *words]
    done = subprocess.run(command, cwd=folder, env=without_settings(os.environ), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RunError(f"fcp {shlex.join(words)} ended with status {done.returncode}, in {folder}")
    return done.stdout


def make_checkpoint(folder: Path) -> None:
    """Save a tiny random model with a tokenizer trained on Python's standard library, as a Hugging Face checkpoint."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    from fcp_cli.training.weights.models import build_model, model_config

    quiet: Any = logging
    quiet.disable_progress_bar()
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_TEXTS]
    tokenizer.train([str(path) for path in texts], trainer)
    config: Any = model_config("qwen3-tiny")
    config.vocab_size = _VOCABULARY
    config.save_pretrained(folder)
    built: Any = build_model(str(folder), seed=0, device=torch.device("cpu"))
    built.save_pretrained(folder)
    kind: Any = PreTrainedTokenizerFast
    kind(tokenizer_object=tokenizer).save_pretrained(folder)
