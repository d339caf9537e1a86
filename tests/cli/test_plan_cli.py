"""`fcp plan` as it is typed: what it assumes, prints and leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from tests.cli.planning_folder import EIGHT_RANKS, assert_one_error_line, fcp, write_dataset
from tests.patience import PATIENCE_SECONDS, wait_until

FAST = ("--solver", "static")
ON_TWO_CORES = ("--cluster", "this-machine", "--ranks", "2", "--global-batch-size", "4", *FAST)
SMALL_CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path)


def write_lengths(folder: Path) -> Path:
    """`lengths.parquet` of short sequences, and no profile: a model that is named has its own computed."""
    (folder / "profile.yaml").unlink()
    pq.write_table(pa.table({"length": [100, 200, 300, 400]}), folder / "lengths.parquet")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_options_it_plans_and_lists_what_it_assumed(tmp_path: Path) -> None:
    write_dataset(tmp_path, profile=False)
    result = fcp("plan", "dataset.parquet", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for setting in ("--profile", "--ranks", "--ranks-per-node", "--tokens-per-rank", "--global-batch-size"):
        assert f"assumed {setting} = " in result.stderr
    assert "wrote plan.parquet" in result.stderr
    assert list(check_plan(tmp_path / "plan.parquet", manifest=read_manifest(tmp_path / "dataset.parquet"))) == []


@pytest.mark.lengthy
@pytest.mark.parametrize("solver", ["fcp", "fcp-paper", "static"])
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_the_summary_fits_80_columns_and_the_plan_is_sound(folder: Path, solver: str, sync: str) -> None:
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--solver", solver, "--sync", sync, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    for label in ("step time", "gap", "idle", "groups", "speed-up", "planning", "hash", "degree"):
        assert label in result.stdout
    assert list(check_plan(folder / "plan.parquet", manifest=read_manifest(folder / "dataset.parquet"))) == []


@pytest.mark.lengthy
def test_padded_rings_are_counted_in_plan_and_comparison_alike(folder: Path) -> None:
    arguments = ("dataset.parquet", *EIGHT_RANKS, "--padded-rings")
    result = fcp("plan", *arguments, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert "more tokens, with sequences padded to multiples of 2 x degree" in result.stdout
    assert list(check_plan(folder / "plan.parquet", manifest=read_manifest(folder / "dataset.parquet"))) == []
    assert PlanReader(folder / "plan.parquet").metadata.padding_multiple == 2
    shown: dict[str, Any] = json.loads(fcp("inspect", "--json", cwd=folder).stdout)
    assert 0 < shown["padding_fraction"] < 0.01
    compared = fcp("compare", *arguments, "--solvers", "fcp,static,fcp-paper", "--steps", "1", cwd=folder)
    assert "4,096 tokens each, padded to 2 per rank" in compared.stderr + compared.stdout, compared.stderr


def test_json_is_the_only_thing_on_stdout(folder: Path) -> None:
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--json", cwd=folder)
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["steps"] == 4
    assert document["sequences"] == 96
    assert document["plan_hash"] == PlanReader(folder / "plan.parquet").metadata.plan_hash
    assert document["gap"] >= 0
    assert document["speedup_over_static"] >= 1
    assert document["planning_milliseconds_per_step"] > 0


def test_a_plan_never_replaces_the_manifest_or_the_profile_it_is_made_from(folder: Path) -> None:
    for source in ("dataset.parquet", "profile.yaml"):
        before = (folder / source).read_bytes()
        result = fcp("plan", "dataset.parquet", "--profile", "profile.yaml", *EIGHT_RANKS, "-o", source, cwd=folder)
        assert (result.returncode, (folder / source).read_bytes()) == (2, before)
        assert result.stderr == f"error: -o {source} would overwrite the source; name another file with -o\n"


def test_a_plan_in_place_of_the_manifest_is_named_and_not_taken_for_the_source(folder: Path) -> None:
    (folder / "plan.parquet").unlink(missing_ok=True)
    assert fcp("-q", "plan", "dataset.parquet", *EIGHT_RANKS, *FAST, cwd=folder).returncode == 0
    error = assert_one_error_line(fcp("plan", "plan.parquet", cwd=folder), 1)
    assert error == snapshot(
        "error: plan.parquet is a plan, not a length manifest; 'fcp inspect plan.parquet' shows it"
    )


def test_quiet_says_nothing(folder: Path) -> None:
    result = fcp("-q", "plan", "dataset.parquet", *EIGHT_RANKS, *FAST, cwd=folder)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_same_seed_gives_the_same_plan_and_another_seed_another(folder: Path) -> None:
    hashes = []
    for seed in ("1", "1", "2"):
        result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--seed", seed, "--json", cwd=folder)
        hashes.append(json.loads(result.stdout)["plan_hash"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_flags_beat_the_environment_which_beats_the_config(folder: Path) -> None:
    (folder / "fcp.yaml").write_text(
        "plan: {ranks: 8, ranks-per-node: 4, tokens-per-rank: 4096, seed: 3, sync: microbatch}"
    )

    def planned(*flags: str, **env: str) -> tuple[int, str]:
        result = fcp("plan", "dataset.parquet", *FAST, *flags, cwd=folder, **env)
        assert result.returncode == 0, result.stderr
        metadata = PlanReader(folder / "plan.parquet").metadata
        return metadata.seed, metadata.sync

    assert planned() == (3, "microbatch")
    assert planned(FCP_PLAN_SEED="4") == (4, "microbatch")
    assert planned("--seed", "5", FCP_PLAN_SEED="4") == (5, "microbatch")


@pytest.mark.processes
def test_a_plan_goes_through_a_pipe(folder: Path) -> None:
    with (folder / "piped.parquet").open("wb") as stdout:
        subprocess.run(
            [sys.executable, "-m", "fcp_cli", "-q", "plan", "dataset.parquet", *EIGHT_RANKS, *FAST, "-o", "-"],
            cwd=folder,
            stdout=stdout,
            check=True,
            timeout=PATIENCE_SECONDS,
        )
    assert list(check_plan(folder / "piped.parquet")) == []
    assert "plan.parquet" not in names(folder)


@pytest.mark.processes
def test_lengths_come_from_standard_input(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fcp_cli", "plan", "-", *EIGHT_RANKS, *FAST],
        cwd=folder,
        input='{"length": 100}\n200\n300\n',
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert PlanReader(folder / "plan.parquet").metadata.manifest.rows == 3


@pytest.mark.processes
def test_planning_imports_no_torch(folder: Path) -> None:
    program = (
        "import sys\n"
        f"sys.argv = ['fcp', '-q', 'plan', 'dataset.parquet', *{EIGHT_RANKS!r}]\n"
        "from fcp_cli.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("characters", [1, 2], "length"),
        ("length", [5, 0, 7], "row 1"),
        ("length", [5, 6, -7], "row 2"),
        ("length", [None, 6], "row 0"),
        ("length", [], "no rows"),
    ],
)
def test_a_bad_manifest_is_one_line_and_writes_nothing(
    tmp_path: Path, column: str, values: list[int | None], message: str
) -> None:
    pq.write_table(pa.table({column: pa.array(values, type=pa.int64())}), tmp_path / "dataset.parquet")
    assert message in assert_one_error_line(fcp("plan", "dataset.parquet", cwd=tmp_path), 1)
    assert names(tmp_path) == ["dataset.parquet"]


def test_a_truncated_manifest_is_one_line_and_writes_nothing(folder: Path) -> None:
    content = (folder / "dataset.parquet").read_bytes()
    (folder / "dataset.parquet").write_bytes(content[: len(content) // 2])
    assert "dataset.parquet" in assert_one_error_line(fcp("plan", "dataset.parquet", cwd=folder), 1)
    assert names(folder) == ["dataset.parquet", "profile.yaml"]


def test_overlong_sequences_are_named_and_the_options_mend_it(folder: Path) -> None:
    arguments = ("plan", "dataset.parquet", *EIGHT_RANKS, *FAST, "--tokens-per-rank", "2000")
    error = assert_one_error_line(fcp(*arguments, cwd=folder), 1)
    assert error == snapshot(
        "error: dataset.parquet: 2 of 96 sequences cannot be planned: row 0 (20000 tokens), row 48 (20000 tokens); 8 ranks of 2000 tokens hold at most 16000; the longest of the others has 4000; add --overlong drop to skip them (truncate cuts them), or --ranks 12 to hold them"
    )
    assert names(folder) == ["dataset.parquet", "profile.yaml"]
    for policy, sequences in (("drop", 94), ("truncate", 96)):
        result = fcp(*arguments, "--max-length", "16000", "--overlong", policy, "--json", cwd=folder)
        assert json.loads(result.stdout)["sequences"] == sequences


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--solver", "magic"), "--solver is 'magic'; it must be one of fcp, "),
        (("--json", "-o", "-"), "--json and -o - both want stdout"),
    ],
)
def test_wrong_usage_has_status_2(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in assert_one_error_line(fcp("plan", "dataset.parquet", *EIGHT_RANKS, *arguments, cwd=folder), 2)
    assert names(folder) == ["dataset.parquet", "profile.yaml"]


@pytest.mark.parametrize(
    ("output", "message"), [("none/plan.parquet", "there is no folder"), ("/dev/full", "it is not a file")]
)
def test_an_output_that_cannot_be_written_is_one_line(folder: Path, output: str, message: str) -> None:
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, *FAST, "-o", output, cwd=folder)
    assert message in assert_one_error_line(result, 1)
    assert names(folder) == ["dataset.parquet", "profile.yaml"]


@pytest.mark.processes
def test_a_full_standard_output_is_one_line(folder: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "fcp_cli", "-q", "plan", "dataset.parquet", *EIGHT_RANKS, *FAST, "-o", "-"],
            cwd=folder,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
    assert result.returncode == 1
    assert result.stderr == snapshot("error: cannot write to standard output: no space left on device\n")


@pytest.mark.processes
def test_a_full_disk_leaves_the_old_plan_and_nothing_else(folder: Path) -> None:
    (folder / "plan.parquet").write_text("before")
    program = (
        "import resource, signal, sys\n"
        # No file may grow further: writing fails as on a full disk.
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        f"sys.argv = ['fcp', '-q', 'plan', 'dataset.parquet', *{EIGHT_RANKS!r}, '--solver', 'static']\n"
        "from fcp_cli.cli.app import main\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert "cannot write" in assert_one_error_line(result, 1)
    assert (folder / "plan.parquet").read_text() == "before"
    assert names(folder) == ["dataset.parquet", "plan.parquet", "profile.yaml"]


@pytest.mark.processes
def test_ctrl_c_has_status_130_and_leaves_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path, sequences=200_000)  # minutes to plan: it is at it when the signal comes
    process = subprocess.Popen(
        [sys.executable, "-m", "fcp_cli", "plan", "dataset.parquet", *EIGHT_RANKS],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        start_new_session=True,
    )

    def is_writing() -> bool:
        assert process.poll() is None
        return any(name.endswith(".partial") for name in names(tmp_path))

    wait_until(is_writing, every_seconds=0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the processes that it starts get it, too
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, err
    assert out == ""
    assert "error: interrupted" in err
    assert "Traceback" not in err
    assert names(tmp_path) == ["dataset.parquet", "profile.yaml"]


def test_a_plan_of_tensor_parallel_ranks_shows_its_devices_and_how_to_launch_it(folder: Path) -> None:
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, *FAST, "--tensor-parallel", "2", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "devices    2 per rank (tensor parallel 2, pipeline parallel 1), 16 in all" in result.stdout
    cut = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --global-batch-size 24"
    assert (
        "wrote plan.parquet for 2 nodes (--target slurm submits the job); next: fcp launch --plan plan.parquet --nodes 2 "
        f"--dry-run -- SCRIPT {cut} ARGS"
    ) in result.stderr
    assert PlanReader(folder / "plan.parquet").metadata.num_devices == 16


def test_all_ranks_of_this_machine_are_on_one_node(folder: Path) -> None:
    ranks = 4 * (os.cpu_count() or 1)  # more than cores
    cut = ("--cluster", "this-machine", "--ranks", str(ranks), "--tokens-per-rank", "512", *FAST)
    planned = fcp("plan", "lengths.parquet", "--model", "qwen3-tiny", *cut, cwd=write_lengths(folder))
    assert planned.returncode == 0, planned.stderr
    assert f"assumed --ranks-per-node = {ranks} (the cluster this-machine)" in planned.stderr


@pytest.mark.parametrize("named", ["run/model", "my models/7b", "qwen3-tiny"])
def test_the_next_command_names_the_model_as_it_was_given(named: str, folder: Path) -> None:
    if "/" in named:
        (folder / named).mkdir(parents=True)
        (folder / named / "config.json").write_text(json.dumps(SMALL_CONFIG))
    planned = fcp("plan", "lengths.parquet", "--model", named, *ON_TWO_CORES, cwd=write_lengths(folder))
    assert planned.returncode == 0, planned.stderr
    assert f"next: fcp launch --model {shlex.quote(named)} --plan plan.parquet" in planned.stderr


def test_a_launch_without_model_asks_for_the_folder_that_the_plan_was_made_for(folder: Path) -> None:
    (folder / "run" / "own").mkdir(parents=True)
    (folder / "run" / "own" / "config.json").write_text(json.dumps(SMALL_CONFIG))
    fcp("plan", "lengths.parquet", "--model", "run/own", *ON_TWO_CORES, cwd=write_lengths(folder))
    launched = fcp("launch", "--dry-run", cwd=folder)
    assert launched.returncode == 2
    assert launched.stderr.endswith(
        "error: the plan was made for the model own, of which there is no folder here; name it with --model FOLDER\n"
    )
    named = ("launch", "--model", "run/own", "--dry-run")
    refused = fcp(*named, "--ranks", "3", cwd=folder)
    assert " --model run/own --cluster " in refused.stderr.partition(" with: fcp plan lengths.parquet")[2]


def test_a_plan_ends_with_a_verdict_and_json_holds_it_as_a_field(folder: Path) -> None:
    shown = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--device-hour-price", "2", cwd=folder)
    lines = shown.stdout.splitlines()
    assert any(line.startswith(("Worth it: fcp takes", "Not worth it: ")) for line in lines)
    assert any(line.startswith("Device-hours an epoch: fcp ") for line in lines)
    printed = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--json", cwd=folder)
    assert "Device-hours" not in printed.stdout
    verdict = json.loads(printed.stdout)["verdict"]
    assert [rival["name"] for rival in verdict["rivals"]] == [*("static", "megatron-dynamic-cp", "packing", "padded")]
    assert verdict["device_hours_per_epoch"] > 0 and verdict["saved_money_per_epoch"] is None


def test_the_folder_s_manifest_is_planned_if_none_is_named_so_that_suggested_options_can_be_pasted(
    tmp_path: Path,
) -> None:
    write_dataset(tmp_path)
    planned = fcp("plan", *EIGHT_RANKS, "--sync", "microbatch", cwd=tmp_path)
    assert "assumed MANIFEST = dataset.parquet (it is in this folder)" in planned.stderr
    assert planned.returncode == 0
    assert (tmp_path / "plan.parquet").is_file()
