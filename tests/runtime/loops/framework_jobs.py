"""Frameworks around transformers' Trainer as users start them: alone on two gloo ranks, and by `fcp launch` under a plan."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fcp_cli.util.processes import torchrun_argv
from tests.manifest.chat_checkpoint import write_checkpoint
from tests.patience import PATIENCE_SECONDS

RANKS, ROWS, GLOBAL_BATCH, STEPS = 2, 24, 8, 3
_BIN = Path(sys.executable).parent
_LAUNCH = ("launch", "--plan", "plan.parquet", "--device", "cpu", "--run-dir")


def write_model(folder: Path) -> Path:
    """Write a Qwen3 of two layers with a tokenizer of bytes, as a checkpoint's folder."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    write_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer) + len(tokenizer) % 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_conversations(path: Path) -> None:
    """Write a question and an answer in each line, of 10 to 300 bytes."""
    draw = random.Random(3)
    rows = []
    for _ in range(ROWS):
        asked, answered = (
            "".join(draw.choices("abcdefgh ", k=draw.choice(sizes))) for sizes in ((5, 40), (5, 60, 250))
        )
        roles = (("user", asked), ("assistant", answered))
        rows.append({"messages": [{"role": role, "content": content} for role, content in roles]})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def run(*words: str, folder: Path) -> str:
    """Run a command in a folder, offline; return what it wrote. A failure fails the test with its last lines."""
    done = subprocess.run(
        words, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=PATIENCE_SECONDS,
        check=False,
    )  # fmt: skip
    written = done.stdout + done.stderr
    assert done.returncode == 0, written[-6000:]
    return written


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }


def alone(*module: str, folder: Path, ranks: int = RANKS) -> str:
    """Run a module and its arguments on gloo ranks, without a plan."""
    return run(*torchrun_argv(ranks), *module, folder=folder)


def fcp(*words: str, folder: Path) -> str:
    return run(str(_BIN / "fcp"), *words, folder=folder)


def write_plan(folder: Path, *source: str, tokens: int = 256) -> None:
    """Plan rows in the data's order so that the longer ones need both ranks; `source` as of `fcp manifest build`."""
    fcp("manifest", "build", *source, "-o", "lengths.parquet", folder=folder)
    fcp(
        *("plan", "lengths.parquet", "--model", "model", "--ranks", str(RANKS), "--ranks-per-node", str(RANKS)),
        *(
            "--tokens-per-rank",
            str(tokens),
            "--global-batch-size",
            str(GLOBAL_BATCH),
            "--no-shuffle",
            "-o",
            "plan.parquet",
        ),
        folder=folder,
    )


def planned(*words: str, folder: Path, options: tuple[str, ...] = ()) -> str:
    """Run a command as users type it, under the folder's plan."""
    return fcp(*_LAUNCH, "run", *options, "--", *words, folder=folder)


def interrupted(*words: str, folder: Path, after: Path) -> tuple[int, str]:
    """Run a command under the plan, and press Ctrl-C once a file exists; return its exit status and what it wrote."""
    written = folder / "interrupted.log"
    with written.open("wb") as log:
        started = subprocess.Popen(
            (str(_BIN / "fcp"), *_LAUNCH, "stopped-run", "--", *words),
            cwd=folder,
            env=_environment(folder),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not after.exists() and started.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            started.send_signal(signal.SIGINT)
            started.wait(PATIENCE_SECONDS)
        finally:
            started.kill()
            started.wait()
    return started.returncode, written.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A checkpoint of a framework: what its Trainer logged, and its weights or adapters."""

    log: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.log if name in entry]


def read_checkpoint(folder: Path) -> Trained:
    from safetensors.torch import load_file

    [weights] = [
        one for one in folder.glob("*.safetensors") if one.name in ("model.safetensors", "adapter_model.safetensors")
    ]
    log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return Trained(log=log, weights=load_file(weights))


def differences(found: Trained, expected: Trained) -> dict[str, float]:
    """Return the largest relative difference of losses and norms, and the largest absolute one of weights."""
    assert found.weights.keys() == expected.weights.keys()
    worst = {"weights": max(float((found.weights[name] - one).abs().max()) for name, one in expected.weights.items())}
    for name in ("loss", "grad_norm", "eval_loss"):
        pairs = list(zip(found.logged(name), expected.logged(name), strict=True))
        worst[name] = max((abs(one - other) / other for one, other in pairs), default=0.0)
    assert len(found.logged("grad_norm")) == STEPS
    return worst
