"""`make demo`: the main job on one machine, with the commands that a user would type.

The data set is the source code of Python's own standard library: real text with a real long tail, on every machine.
The model is a tiny checkpoint in Hugging Face form, made on the spot: random weights, and a tokenizer of that text. The
text is measured, the machine profiled, the work planned twice (the best static degree, and fcp), verified against one
process, trained twice on four gloo ranks, and summed up in one table; transformers then loads what was trained.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fcp_cli.cost.profile import load_cost_profile
from fcp_cli.plan.reader import PlanReader

FOLDER = Path("demo")
CHECKPOINT = FOLDER / "checkpoint"
PAGE = FOLDER / "report.html"
VOCABULARY = 1024
STEPS = 16
RANKS = 4
WARM_UP_STEPS = 2  # the first steps pay for page faults and allocator growth
MAX_LENGTH_TOKENS = 4096
PROMPT = "        self.assert"

OPENING = (
    "You will see one small job, from text to a trained model, twice: with one static degree for all, and by fcp.",
    "First: how long the files of Python's standard library are, and what a token costs on this machine.",
    "Then two plans, each checked against one process, two trainings, and a table: predicted beside measured.",
    "Then a line of text by the trained model, loaded with transformers, and what the same files would take on 64",
    "ranks, by each strategy, and a page of the run to look at. All of it takes some six minutes.",
)

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A plan with what was predicted and what its run measured, medians over the steps after warm-up."""

    name: str
    predicted_seconds: float  # the plan's makespan, and what the profile says of a step's work beside micro-batches
    measured_seconds: float
    measured_beside_seconds: float  # of these, after the last micro-batch: gradient sum, clipping, optimizer, metrics
    predicted_idle: float
    measured_idle: float
    first_loss: float
    last_loss: float
    gradient_difference: float


def main() -> None:
    """Run the whole demo, up to the first command that fails."""
    started = time.monotonic()
    for line in OPENING:
        console.print(line, soft_wrap=True)
    FOLDER.mkdir(exist_ok=True)
    library = sysconfig.get_paths()["stdlib"]
    make_checkpoint(Path(library))
    files = ["--include", "*.py", "--exclude", "site-packages"]
    fcp("manifest", "build", library, *files, "--tokenizer", str(CHECKPOINT), "-o", "demo/lengths.parquet")
    # With as many processes as the job will have: what they take from each other is part of what a step takes.
    # A formula that was fitted to groups of 1, 2 and 4 ranks prices those of 3, too, and the time goes to fewer points.
    options = ["--model", str(CHECKPOINT), "--ranks", str(RANKS), "--degrees", "1,2,4", "--budget-minutes", "0.8"]
    fcp("profile", *options, "--fresh", "-o", "demo/profile.yaml")
    outcomes = [run_plan("static"), run_plan("fcp")]
    console.print(f"\n{STEPS} steps of Python's standard library on {RANKS} ranks:")
    console.print(summary(outcomes))
    for line in in_words(outcomes):
        console.print(line, soft_wrap=True)
    console.print(f"\nThe trained model in {trained('fcp')}, loaded with transformers, goes on after {PROMPT!r}:")
    console.print(generated_line(trained("fcp")), style="bold", markup=False, soft_wrap=True)
    fcp("report", str(FOLDER / "run-fcp"), "-o", str(PAGE))
    console.print("\nWhat the same files would take Qwen3-8B on 64 ranks of a cluster, as the cost model predicts:")
    compare_on_a_cluster()
    console.print(f"\nThe page of the run, planned beside measured, for any browser: {PAGE.resolve()}", soft_wrap=True)
    console.print(f"All of it took {(time.monotonic() - started) / 60:.1f} minutes.")


def run_plan(solver: str) -> Outcome:
    """Plan, verify and train with one solver."""
    plan = FOLDER / f"plan-{solver}.parquet"
    options = {
        "profile": "demo/profile.yaml",
        "ranks": RANKS,
        "ranks-per-node": RANKS,
        "tokens-per-rank": MAX_LENGTH_TOKENS // 2,
        "global-batch-size": 12,
        "max-length": MAX_LENGTH_TOKENS,
        "overlong": "drop",
        "steps": STEPS,
        "solver": solver,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    fcp("plan", "demo/lengths.parquet", *flags, "-o", str(plan))
    verified = json.loads(fcp("verify", "--plan", str(plan), "--json"))
    run_dir = FOLDER / f"run-{solver}"
    shutil.rmtree(run_dir, ignore_errors=True)  # of an earlier demo
    rate = ["--learning-rate", "1e-2", "--warmup-steps", "1"]
    fcp("launch", "--model", str(CHECKPOINT), "--plan", str(plan), "--run-dir", str(run_dir), *rate)
    return outcome(solver, plan, read_steps(run_dir / "metrics.jsonl"), verified)


def make_checkpoint(library: Path) -> None:
    """Save a tiny model with random weights and a tokenizer of the text, as a fine-tuning job would be given one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from fcp_cli.training.models import build_model, model_config

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in sorted(library.glob("*.py"))[:100]], trainer)
    config: Any = model_config("qwen3-tiny")
    config.vocab_size = VOCABULARY
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    config.save_pretrained(CHECKPOINT)
    built: Any = build_model(str(CHECKPOINT), seed=0, device=torch.device("cpu")).model
    built.save_pretrained(CHECKPOINT)
    kind: Any = PreTrainedTokenizerFast
    kind(tokenizer_object=tokenizer).save_pretrained(CHECKPOINT)


def trained(solver: str) -> Path:
    """Return where a run leaves its model."""
    return FOLDER / f"run-{solver}" / "model"


def generated_line(folder: Path) -> str:
    """Return a prompt and what a checkpoint goes on with, up to the end of the line: transformers alone, no fcp."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    family: Any = AutoModelForCausalLM
    model = family.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    tokens = model.generate(inputs.input_ids, max_new_tokens=48, do_sample=True, top_k=8, pad_token_id=0)[0]
    text: str = tokenizer.decode(tokens)
    return text.splitlines()[0]


def fcp(*arguments: str) -> str:
    """Run one fcp command as a user would and return its stdout."""
    console.print(f"\n[bold]$ fcp {shlex.join(arguments)}[/]", soft_wrap=True)
    result = subprocess.run([sys.executable, "-m", "fcp_cli", *arguments], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(result.returncode)
    return result.stdout


def read_steps(metrics: Path) -> list[dict[str, Any]]:
    """Return the step records of a run."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == "step"]


def outcome(name: str, plan: Path, steps: Sequence[dict[str, Any]], verified: dict[str, Any]) -> Outcome:
    """Put the plan's predictions beside what was measured."""
    reader = PlanReader(plan)
    planned = list(reader.steps())
    beside_seconds = float(load_cost_profile(FOLDER / "profile.yaml").measurement["step_seconds"])
    warm = slice(WARM_UP_STEPS, None)
    return Outcome(
        name=name,
        predicted_seconds=statistics.median(step.makespan_seconds for step in planned[warm]) + beside_seconds,
        measured_seconds=statistics.median(step["seconds"] for step in steps[warm]),
        measured_beside_seconds=statistics.median(step["seconds"] - last_end(step) for step in steps[warm]),
        predicted_idle=statistics.mean(step.idle_fraction(RANKS) for step in planned[warm]),
        measured_idle=statistics.mean(step["idle_fraction"] for step in steps[warm]),
        first_loss=steps[0]["loss"],
        last_loss=steps[-1]["loss"],
        gradient_difference=max(step["gradient_difference"] for step in verified["steps"]),
    )


def last_end(step: dict[str, Any]) -> float:
    """Return when the last micro-batch of a step ended, in seconds from its start."""
    timings = (timing for rank in step["ranks"] for timing in rank["micro_batches"])
    return max(float(timing["start_seconds"] + timing["seconds"]) for timing in timings)


def summary(outcomes: Sequence[Outcome]) -> Table:
    """Return the one table at the end."""
    table = Table()
    table.add_column("")
    for one in outcomes:
        table.add_column(one.name, justify="right")
    rows = {
        "predicted step": [f"{o.predicted_seconds:.2f} s" for o in outcomes],
        "measured step": [f"{o.measured_seconds:.2f} s" for o in outcomes],
        "of these beside micro-batches": [f"{o.measured_beside_seconds:.2f} s" for o in outcomes],
        "prediction error": [f"{o.predicted_seconds / o.measured_seconds - 1:+.0%}" for o in outcomes],
        "predicted idle": [f"{o.predicted_idle:.1%}" for o in outcomes],
        "measured idle": [f"{o.measured_idle:.1%}" for o in outcomes],
        "loss, first step": [f"{o.first_loss:.3f}" for o in outcomes],
        "loss, last step": [f"{o.last_loss:.3f}" for o in outcomes],
        "largest gradient difference": [f"{o.gradient_difference:.1e}" for o in outcomes],
    }
    for label, values in rows.items():
        table.add_row(label, *values)
    return table


def compare_on_a_cluster() -> None:
    """Compare strategies where waiting costs something: on shared cores a rank that waits lends its core to others."""
    profile = str(FOLDER / "qwen3-8b.yaml")
    # With recomputation a rank of this cluster holds more than 16,384 tokens.
    cluster = ["--model", "qwen3-8b", "--cluster", "h200-8x8", "--recompute", "full"]
    fcp("profile", "--analytic", *cluster, "-o", profile)
    options = ["--profile", profile, "--tokens-per-rank", "16384", "--max-length", "131072", "--overlong", "drop"]
    options += ["--global-batch-size", "64", "--steps", "8", "--sync", "iteration"]
    fcp("compare", "demo/lengths.parquet", *options)


def in_words(outcomes: Sequence[Outcome]) -> list[str]:
    """Return lines on what the table shows, and on what it cannot show here."""
    static, fcp_ = outcomes
    cores = os.cpu_count() or 1
    lines = [
        f"Measured speed-up over the best static plan: {static.measured_seconds / fcp_.measured_seconds:.2f}x "
        f"(predicted {static.predicted_seconds / fcp_.predicted_seconds:.2f}x).",
        "Gradients are compared with one process in fp64 (fcp verify); the limit is 1e-12.",
    ]
    if cores < RANKS:
        lines.append(
            f"{RANKS} ranks share {cores} cores: a rank that waits lends its core to the others, and one large degree "
            "for all is hard to beat here. 'make pace' runs plans on ranks that lend none (docs/research/paced.md)."
        )
    return lines


if __name__ == "__main__":
    main()
