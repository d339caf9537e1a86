from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest
import yaml

from fcp_cli.cost.profile import load_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.profiling.choices import default_degrees
from fcp_cli.profiling.points import heads_points, measurement_points
from fcp_cli.profiling.refit import HOLD_OUT_EVERY
from fcp_cli.profiling.samples import read_measurement, read_samples
from fcp_cli.util.processes import descendants, send
from tests.cli.planning_folder import Outcome, typed
from tests.forked_ranks import is_rank
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.profiling.test_refit import PLANNED, write_run

ENVIRONMENT = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


class Fcp(Protocol):
    def __call__(self, *words: str, status: int = 0) -> Outcome: ...


@pytest.fixture
def fcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fcp:
    """Run `fcp` in an empty folder; it must leave with the given status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str, status: int = 0) -> Outcome:
        done = typed(*words)
        assert done.status == status, done.err
        return done

    return run


def test_analytic_writes_a_profile_and_says_what_it_assumed(tmp_path: Path, fcp: Fcp) -> None:
    done = fcp("profile", "--analytic", "--model", "qwen3vl-8b")
    assert "assumed --cluster = example-8x8" in done.err
    assert "assumed recipe = ZeRO-3, bf16, " in done.err  # what is computed again follows from the memory model
    assert "recomputation, chunked loss, sharded over 8 ranks" in done.err
    assert "assumed --sync = microbatch" in done.err
    assert "assumed efficiency = 50% of 320 TFLOP/s" in done.err
    profile = load_cost_profile(tmp_path / "profile.yaml")
    assert (profile.model, profile.origin) == ("qwen3-vl-8b", "analytic")
    assert "Token budget: " in done.out


def test_a_profile_can_go_to_stdout(tmp_path: Path, fcp: Fcp) -> None:
    done = fcp("-q", "profile", "--analytic", "-o", "-")
    assert yaml.safe_load(done.out)["model"] == "qwen3-vl-8b"
    assert list(tmp_path.iterdir()) == []


def test_after_a_computed_profile_the_next_command_searches_the_recipe_that_suits_the_lengths(fcp: Fcp) -> None:
    done = fcp("profile", "--analytic", "-o", "mine.yaml")
    again = "--model qwen3-vl-8b --cluster example-8x8"
    assert done.err.splitlines()[-1] == (
        f"wrote mine.yaml (analytic), which 'fcp profile show mine.yaml' explains; next: fcp plan MANIFEST {again}"
    )
    Path("lengths.parquet").touch()
    assert fcp("profile", "--analytic").err.splitlines()[-1].endswith(f"; next: fcp plan lengths.parquet {again}")


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "Qwen/Qwen3-VL-8B", "qwen3-vl-8b-example-8x8"])
def test_show_finds_the_example_of_a_model_by_its_name(fcp: Fcp, name: str) -> None:
    shown = fcp("profile", "show", name)
    assert shown.err == "no such file; this is the example qwen3-vl-8b-example-8x8.yaml\n"
    assert "qwen3-vl-8b on example-8x8" in shown.out


def test_show_explains_each_figure_and_the_break_even_length(tmp_path: Path, fcp: Fcp) -> None:
    fcp("profile", "--analytic", "--recompute", "none")
    shown = fcp("profile", "show").out
    assert "Break-even: attention takes as long as linear work at 43,992 tokens." in shown
    assert "alpha1: causal attention, forward" in shown
    document = json.loads(fcp("profile", "show", "--json", "--lengths", "4096").out)
    assert document["break_even_tokens"] == pytest.approx(43_992, abs=1)
    assert len(document["seconds"]["4096"]) == 4


def test_a_profile_is_summed_up_alike_when_it_is_made_and_when_it_is_shown(tmp_path: Path, fcp: Fcp) -> None:
    made = fcp("profile", "--analytic", "-o", "a.yaml").out
    shown = fcp("profile", "show", "a.yaml").out
    printed = [line for line in made.splitlines() if line.startswith(("Break-even", "Attention hides", "Token budget"))]
    assert [line.split(" of degree ")[1][0] for line in printed if " of degree " in line] == ["2", "8"]
    assert len(printed) == 4
    assert set(printed) <= set(shown.splitlines())
    assert "of degree 3 from" in fcp("profile", "show", "a.yaml", "--degrees", "1,3").out


def test_fit_shows_the_error_before_and_after(tmp_path: Path, fcp: Fcp) -> None:
    write_run(tmp_path)
    done = fcp("profile", "fit", str(tmp_path), "-o", "fitted.yaml", "--json")
    assert "warning" not in done.err
    assert "31 micro-batches fitted, 7 held out; held-out error before" in done.err
    document = json.loads(done.out)
    assert document["micro_batches_fitted"] + document["micro_batches_held_out"] == 38
    assert document["held_out_error_percent"]["after"] < 1 < document["held_out_error_percent"]["before"]
    assert "unchanged, because no micro-batch exercises them: bandwidth_bytes_per_second.inter_node" in done.err
    assert load_cost_profile(tmp_path / "fitted.yaml").origin == "fitted"


def test_a_refit_that_predicts_worse_says_so(tmp_path: Path, fcp: Fcp) -> None:
    """Held-out micro-batches took the planned time; fitted ones took longer."""
    metrics, _ = write_run(tmp_path)
    longer = [json.loads(line) for line in metrics.read_text().splitlines()]
    write_run(tmp_path, truth=PLANNED)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    packs = [(step, ranks) for step in range(2, len(lines)) for ranks in ((0, 1), (2,))]
    for number, (step, ranks) in enumerate(packs):
        for rank in ranks if (number + 1) % HOLD_OUT_EVERY else ():
            lines[step]["ranks"][rank] = longer[step]["ranks"][rank]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = fcp("profile", "fit", str(metrics), "-o", "fitted.yaml")
    assert "warning: the refit predicts held-out micro-batches worse than the profile before" in done.err


def test_fit_never_replaces_the_metrics_it_reads(tmp_path: Path, fcp: Fcp) -> None:
    metrics, _ = write_run(tmp_path)
    before = metrics.read_bytes()
    done = fcp("profile", "fit", str(metrics), "-o", str(metrics), status=2)
    assert "would overwrite the source; name another file with -o" in done.err
    assert metrics.read_bytes() == before


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--analytic", "--model", "qwen3-9b"], 1, "unknown model 'qwen3-9b'; nearest: "),
        (["--analytic", "--cluster", "h300"], 1, "unknown cluster 'h300'; nearest: "),
        (["--analytic", "--model", "no.json"], 1, "cannot read the model configuration no.json"),
        (["--analytic", "-o", "-", "--json"], 2, "--json and -o - both want stdout; write the profile to a file"),
        (["fit", "no.jsonl", "-o", "-", "--json"], 2, "--json and -o - both want stdout; write the profile to a file"),
        (
            ["--analytic", "--precision", "fp8"],
            2,
            "--precision is 'fp8'; it must be one of auto, bf16, amp, fp32, fp64",
        ),
        (["--analytic", "--tensor-parallel", "3"], 2, "--tensor-parallel 3 does not divide num_heads 32"),
        (["--analytic", "--zero", "0"], 1, "qwen3-vl-8b does not fit: it takes "),
        (["--analytic", "--loss", "liger"], 2, "--loss is 'liger'; it must be one of auto, chunked, plain"),
        (["--analytic", "--model", "qwen3-8b", "--freeze-vision"], 2, "qwen3-8b has no vision encoder"),
        (["--device", "tpu"], 2, "--device is 'tpu'; it must be one of auto, cpu, cuda, npu"),
        (["--device", "cpu", "--max-length", "10"], 2, "--max-length is 10; it must be at least 512"),
        (["--from-samples", "no.jsonl"], 1, "cannot read the samples no.jsonl"),
        (["show", "no.yaml"], 1, "there is no cost profile no.yaml; make one with 'fcp profile -o no.yaml'"),
        (["fit", "no.jsonl"], 1, "cannot read the metrics no.jsonl: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, fcp: Fcp, words: list[str], status: int, message: str
) -> None:
    done = fcp("-q", "profile", *words, status=status)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["-1.0", ".nan"])
def test_a_broken_coefficient_is_named_by_its_path(tmp_path: Path, fcp: Fcp, value: str) -> None:
    fcp("profile", "--analytic")
    path = tmp_path / "profile.yaml"
    lines = path.read_text().splitlines()
    broken = [f"  microbatch_seconds: {value}" if "microbatch_seconds:" in line else line for line in lines]
    path.write_text("\n".join(broken))
    done = fcp("profile", "show", status=1)
    assert "coefficients.microbatch_seconds is" in done.err


def test_several_nodes_get_a_command_to_run_on_each(tmp_path: Path, fcp: Fcp) -> None:
    done = fcp("profile", "--model", "qwen3-8b", "--nodes", "2", "--device", "cuda")
    assert "--nproc-per-node=8 --nnodes=2" in done.out
    assert done.out.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ")  # as a job gets it
    assert '--rdzv-conf=rank="$NODE_RANK"' in done.out
    points = read_measurement(tmp_path / "profile.request.json").points()
    assert {point.degree for point in points if point.crosses_nodes} == {2, 3, 4, 6, 8}


def test_ranks_that_do_not_divide_over_the_nodes_are_refused(tmp_path: Path, fcp: Fcp) -> None:
    words = ("profile", "--model", "qwen3-8b", "--nodes", "7", "--ranks", "2", "--device", "cuda")
    assert fcp(*words, status=2).err.splitlines()[-1] == (
        "error: --ranks 2 does not divide over --nodes 7; give the ranks of all nodes"
    )
    assert not (tmp_path / "profile.request.json").exists()


@pytest.mark.processes
@pytest.mark.hf
@pytest.mark.distributed
def test_a_measurement_whose_worker_dies_is_kept_and_gone_on_with(tmp_path: Path, fcp: Fcp, forked_jobs: None) -> None:
    words = ["profile", "--ranks", "2", "--max-length", "512", "--budget-minutes"]
    # So that the rest fits however slow this machine is; two ranks run rings, and share heads.
    every_point = len(measurement_points(512, default_degrees(2))) + len(heads_points(512, default_degrees(2), (2,)))
    _kill_a_rank_after(every_point, [*words, "10"], tmp_path)
    kept = len(read_samples(tmp_path / "profile.samples.jsonl").of_kind("observation"))
    assert kept >= every_point
    early = load_cost_profile(tmp_path / "profile.yaml")  # of what was observed until then
    assert early.origin == "measured" and early.measurement["points"]

    done = fcp(*words, "0.1", "--json")
    assert "continuing the measurement in profile.samples.jsonl" in done.err
    assert "error held out" in done.err
    profile = load_cost_profile(tmp_path / "profile.yaml")
    assert json.loads(done.out)["profile"]["origin"] == profile.origin == "measured"
    assert profile.model == "qwen3-tiny"
    measurement = profile.measurement
    assert measurement["degrees"] == [1, 2]
    assert {"torch", "date", "device_name", "held_out_error_percent", "step_seconds"} <= set(measurement)
    assert all(point["seconds"] > 0 for point in measurement["points"])
    assert profile.heads is not None and profile.heads.query_heads == 4  # and priced as it was measured
    assert profile.heads.bandwidth_share != 1.0
    assert [point["held_out"] for point in measurement["points"] if "heads_degree" in point].count(True) >= 2
    assert profile.recipe == Recipe(precision="fp32")
    assert profile.memory.model_state_bytes >= 16 * 426_752  # fp32 weights, gradients and two moments
    assert (profile.memory.tokens_per_rank() or 0) > 1000
    samples = read_samples(tmp_path / "profile.samples.jsonl")
    assert samples.finished
    assert len(samples.of_kind("observation")) > kept


def _kill_a_rank_after(observations: int, words: list[str], folder: Path) -> None:
    """Start `fcp`, kill one of its ranks once so much was observed, and expect one line about what is kept."""
    argv = [sys.executable, "-m", "fcp_cli", *words]
    process = subprocess.Popen(argv, cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    samples = folder / "profile.samples.jsonl"

    def has_observed() -> bool:
        assert process.poll() is None
        return samples.exists() and samples.read_text().count('"observation"') >= observations

    wait_until(has_observed)
    rank_0 = next(pid for pid in descendants(process.pid) if is_rank(pid, 0))
    send([rank_0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1, stderr
    assert "observations are kept in profile.samples.jsonl: run the command again to continue" in stderr
