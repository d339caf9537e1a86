"""`fcp launch` as it is typed: what it prints, what it refuses, and a user's own script for real."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

import fcp_cli
from fcp_cli.errors import RunError
from fcp_cli.runs.owner import read_owner
from fcp_cli.util import machine, network
from fcp_cli.util.machine import LocalDevices
from tests.cli.planning_folder import Outcome, typed
from tests.forked_ranks import shared_by_scripts
from tests.forked_ranks.rank_forking import SHARED
from tests.runs.records import write_launch
from tests.training.small_runs import run_fcp, write_manifest, write_small_plan

Fcp = Callable[..., Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    manifest = write_manifest(folder)
    write_small_plan(folder / "plan.parquet", manifest, steps=3, model="qwen3-tiny")
    write_small_plan(folder / "plan1.parquet", manifest, steps=1, num_ranks=1)
    write_small_plan(folder / "plan2.parquet", manifest, steps=1, num_ranks=2)
    write_small_plan(folder / "plan8.parquet", manifest, steps=1, num_ranks=8)
    write_small_plan(folder / "plan64.parquet", manifest, steps=1, num_ranks=64)
    pq.write_table(pq.read_table(manifest, columns=["length"]).replace_schema_metadata(None), folder / "bare.parquet")
    write_small_plan(folder / "bare_plan.parquet", folder / "bare.parquet", steps=1)
    return folder


@pytest.fixture
def fcp(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fcp:
    """Run `fcp launch ...` in this process, on a machine of two cores."""
    laptop = LocalDevices(device="cpu", num_devices=0, num_cores=2, memory_bytes=16 << 30)
    monkeypatch.setattr(machine, "find_machine", lambda device="auto": laptop)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(folder)
    return partial(typed, "launch")


def test_with_nothing_more_it_says_what_it_assumed(fcp: Fcp, folder: Path) -> None:
    result = fcp("--dry-run")
    assert result.status == 0
    assert result.err.splitlines() == snapshot(
        [
            "assumed --model = qwen3-tiny (the plan's cost profile)",
            "assumed --plan = plan.parquet (it is in this folder)",
            "assumed --weights = random (--weights FOLDER, or a checkpoint's folder as --model, starts from one)",
            "assumed --manifest = lengths.parquet (the plan was made from it)",
        ]
    )
    run_dir = folder / "runs" / "qwen3-tiny-001"
    words = [word for word in shlex.split(result.out) if not word.startswith("--rdzv-id=")]
    assert words == [
        "env",
        f"FCP_PLAN={folder}/plan.parquet",
        f"FCP_METRICS={run_dir}/metrics.jsonl",
        f"FCP_RUN_DIR={run_dir}",
        "OMP_NUM_THREADS=1",
        sys.executable,
        *("-m", "torch.distributed.run", "--nproc-per-node=4", "--rdzv-backend=fcp", "--rdzv-endpoint=127.0.0.1:0"),
        *(f"--log-dir={run_dir}/logs/start-001", "--redirects=3"),
        *("-m", "fcp_cli.training.train", "--plan", f"{folder}/plan.parquet", "--model", "qwen3-tiny"),
        *("--run-dir", str(run_dir), "--manifest", f"{folder}/lengths.parquet", "--quiet"),
    ]
    assert not (folder / "runs").exists()


def test_a_manifest_of_lengths_alone_trains_on_random_tokens_and_says_so(fcp: Fcp) -> None:
    result = fcp("--plan", "bare_plan.parquet", "--model", "qwen3-tiny", "--dry-run")
    assert result.err.splitlines()[-1] == snapshot(
        "assumed tokens = random (bare.parquet holds lengths only, no source of tokens)"
    )
    assert "--manifest" not in result.out


def test_a_plan_that_was_priced_for_a_trained_encoder_says_so_to_a_frozen_one(fcp: Fcp, folder: Path) -> None:
    profile = "qwen3-vl-tiny\nmeasurement: {freeze_vision: false}"
    write_small_plan(folder / "vision_plan.parquet", folder / "lengths.parquet", steps=1, model=profile)
    words = ("--plan", "vision_plan.parquet", "--dry-run")
    result = fcp(*words, "--freeze-vision")
    assert (
        "assumed cost profile = that of a trained vision encoder (the run has a frozen one; fcp profile --analytic "
        "--freeze-vision)"
    ) in result.err
    assert "--freeze-vision" in result.out
    assert "vision encoder" not in fcp(*words).err


def test_a_plan_beyond_this_machine_prints_a_command_per_node(fcp: Fcp) -> None:
    result = fcp(
        "--plan", "plan64.parquet", "--model", "qwen3-tiny", "--nodes", "2", "--master-addr", "10.0.0.1", "--dry-run",
        "--json",
    )  # fmt: skip
    document = json.loads(result.out)
    assert (document["num_nodes"], document["processes_per_node"], document["num_ranks"]) == (2, 32, 64)
    for node, command in enumerate(document["commands"]):
        assert command["node"] == node
        assert {"--nnodes=2", "--rdzv-endpoint=10.0.0.1:29500"} <= set(command["argv"])
        assert any(word.startswith(f"--rdzv-conf=rank={node},timeout=") for word in command["argv"])
        assert any(word.endswith(f"/logs/start-001-node{node}") for word in command["argv"])
    assert "one command per node, 32 processes each; all nodes must see" in result.err


def test_a_script_gets_the_job_instead_of_the_trainer(fcp: Fcp, folder: Path) -> None:
    (folder / "mine.py").write_text("")
    result = fcp("--model", "qwen3-tiny", "--dry-run", "--", "mine.py", "--lr", "a b")
    words = shlex.split(result.out)
    assert words[-6:] == ["-m", "fcp_cli.runtime", "--", "mine.py", "--lr", "a b"]
    assert "FCP_MODEL=qwen3-tiny" in words
    assert f"FCP_RUN_DIR={folder}/runs/mine-001" in words
    assert "assumed --plan = plan.parquet (it is in this folder; " in result.err
    module = shlex.split(fcp("--dry-run", "--", "-m", "my.module", "--flag").out)
    assert module[-6:] == ["-m", "fcp_cli.runtime", "--", "-m", "my.module", "--flag"]
    assert json.loads(fcp("--dry-run", "--json", "--", "mine.py", "x").out)["program"] == ["mine.py", "x"]


def test_a_script_is_started_bare_where_no_hooks_are_wanted(fcp: Fcp, folder: Path) -> None:
    (folder / "mine.py").write_text("")
    words = shlex.split(fcp("--inject", "none", "--dry-run", "--", "mine.py", "x").out)
    assert words[-3:] == ["--redirects=3", "mine.py", "x"]


def test_a_command_of_ones_own_gets_the_hooks_by_its_environment(
    fcp: Fcp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    words = shlex.split(
        fcp("--inject", "env", "--accept-other-batches", "--dry-run", "--", "bash", "train.sh", "a b").out
    )
    site = Path(fcp_cli.__file__).parent / "runtime" / "site"
    assert words == [
        "env",
        f"FCP_PLAN={folder}/plan.parquet",
        f"FCP_METRICS={folder}/runs/bash-001/metrics.jsonl",
        f"FCP_RUN_DIR={folder}/runs/bash-001",
        "FCP_PROBE=1",
        f"PYTHONPATH={site}:/mine",
        "FCP_ACCEPT_OTHER_BATCHES=1",
        *("bash", "train.sh", "a b"),
    ]
    assert (site / "sitecustomize.py").is_file()


def test_a_head_node_without_torch_still_prints_commands(fcp: Fcp, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_torch(device: str = "auto") -> LocalDevices:
        raise RunError("torch is not installed here")

    monkeypatch.setattr(machine, "find_machine", no_torch)
    result = fcp("--dry-run")
    assert result.status == 0
    assert "torch is not installed here; the commands are for the nodes that the plan was made for" in result.err
    assert "--nproc-per-node=4" in result.out
    assert fcp().last_line == "error: torch is not installed here"


REFUSED = [
    "--plan plan8.parquet --ranks 4",
    "--plan plan64.parquet",
    "--plan lengths.parquet",
    "--plan bare.parquet",
    "--manifest bare.parquet --plan plan8.parquet --model qwen3-tiny --steps 2",
    "--model qwen3-8b",
    "--plan plan8.parquet",
    "--learning-rate -1",
    "--inject all -- x.py",
    "--inject env",
    "--accept-other-batches",
    "--inject env --nodes 2 -- bash",
    "--inject env --json -- bash",
    "--inject env -- ./no.sh",
    "--resume",
    "-- nope.py",
    "-- --x 3",
    "--steps 2 -- x.py",
    "--zero 2 -- x.py",
    "--zero 3 --dry-run",
    "--attention-kernel cudnn",
    "--attention-kernel fa5",
    "--online",
    "--online --plan plan.parquet -- mine.py",
    "--online --ranks 2 -- mine.py",
    "--online --target slurm -- mine.py",
    "--global-batch-size 8 --dry-run -- mine.py",
    "--online --inject env -- mine.py",
]
# What is typed behind `fcp launch` -> the exit status and the last line.
REFUSALS = snapshot(
    {
        "--plan plan8.parquet --ranks 4": "1: error: plan8.parquet is for 8 ranks, but --ranks is 4; make a plan for 4 with: fcp plan lengths.parquet --ranks 4 --ranks-per-node 4 --tokens-per-rank 4096 --sync iteration --global-batch-size 6 --no-shuffle --solver 'by hand' -o plan8-4-ranks.parquet",
        "--plan plan64.parquet": "1: error: plan64.parquet needs 64 processes on this machine, which holds 8 (no accelerator, 2 CPU cores (gloo)); plan for fewer ranks with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 4096 --sync iteration --global-batch-size 6 --no-shuffle --solver 'by hand' -o plan64-8-ranks.parquet",
        "--plan lengths.parquet": "1: error: lengths.parquet is a length manifest, not a plan; 'fcp plan lengths.parquet' plans it",
        "--plan bare.parquet": "1: error: bare.parquet is a Parquet file but not a plan; make one with 'fcp plan bare.parquet -o plan-2.parquet'",
        "--manifest bare.parquet --plan plan8.parquet --model qwen3-tiny --steps 2": "1: error: --steps is 2, but plan8.parquet ends after 1; plan more with --epochs, or remove --steps",
        "--model qwen3-8b": "1: error: qwen3-8b needs 534 GB for weights, gradients and optimizer on 4 ranks, but this machine has 17 GB; try --model qwen3-tiny, or launch on accelerators",
        "--plan plan8.parquet": "2: error: name the model to train with --model, for example --model qwen3-tiny, or give a script after --",
        "--learning-rate -1": "2: error: --learning-rate is -1; it must be at least 0; see 'fcp launch --help'",
        "--inject all -- x.py": "2: error: --inject is 'all'; it must be one of entry, env, none; see 'fcp launch --help'",
        "--inject env": "2: error: --inject is for a script or command of your own, given after --",
        "--accept-other-batches": "2: error: --accept-other-batches is for a script of your own, given after --",
        "--inject env --nodes 2 -- bash": "2: error: --nodes is for jobs that fcp starts; give it to bash itself",
        "--inject env --json -- bash": "2: error: --json with --inject env needs --dry-run: the command itself writes to stdout",
        "--inject env -- ./no.sh": "1: error: cannot start ./no.sh: No such file or directory; --inject env runs a command that starts the ranks itself, like 'bash train.sh' or 'torchrun ...'; remove it for a Python script",
        "--resume": "1: error: there is no run in the folder runs to resume; name one with --run-dir",
        "-- nope.py": "2: error: there is no script nope.py, neither here nor on PATH",
        "-- --x 3": "2: error: after -- comes a script or '-m MODULE', not --x; the trainer's options go before --",
        "--steps 2 -- x.py": "2: error: --steps is for the bundled trainer; give x.py its own arguments after it",
        "--zero 2 -- x.py": "2: error: --zero is for the bundled trainer; give x.py its own arguments after it",
        "--zero 3 --dry-run": "2: error: --zero 3 gathers weights in every micro-batch, of which ranks run different numbers under sync iteration; give --zero 2, or plan with 'fcp plan --sync microbatch'",
        "--attention-kernel cudnn": "2: error: --attention-kernel cudnn is for NVIDIA devices, and this job runs on cpu",
        "--attention-kernel fa5": "2: error: --attention-kernel is 'fa5'; it must be one of auto, cudnn, fa2, fa3, fa4; see 'fcp launch --help'",
        "--online": "2: error: --online is for a script of your own, given after --; the bundled trainer knows its lengths before: plan them with 'fcp plan'",
        "--online --plan plan.parquet -- mine.py": "2: error: --plan is followed, --online makes one in the run directory; give one of them",
        "--online --ranks 2 -- mine.py": "2: error: --online prices steps before the script has made its model: name it with --model NAME|FILE|FOLDER, or give measured times with --profile FILE",
        "--online --target slurm -- mine.py": "2: error: --online starts a job from here; remove --target slurm, or start it on each node",
        "--global-batch-size 8 --dry-run -- mine.py": "2: error: --global-batch-size is for --online; a plan has its own: fcp plan MANIFEST --global-batch-size ...",
        "--online --inject env -- mine.py": "2: error: --online is for jobs that fcp starts, --inject env for commands that start their own ranks",
    }
)


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_one_line(fcp: Fcp, words: str) -> None:
    Path("mine.py").write_text("")
    result = fcp(*words.split())
    last_line = re.sub("see '.*fcp launch", "see 'fcp launch", result.last_line)  # click names pytest as the program
    assert f"{result.status}: {last_line}" == REFUSALS[words]


def test_without_a_plan_the_command_that_makes_one_is_named(
    fcp: Fcp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fcp("--model", "qwen3-tiny")
    assert result.status == 1
    assert result.err == snapshot(
        "error: there is no plan.parquet here; make one with 'fcp plan MANIFEST -o plan.parquet', or name one with "
        "--plan\n"
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "dataset.parquet").touch()
    assert "make one with 'fcp plan dataset.parquet -o plan.parquet'" in fcp("--model", "qwen3-tiny").err
    for plan in ([], ["--plan", "plan.parquet"]):  # one made on node 1 would be another
        assert fcp("--model", "qwen3-tiny", "--nodes", "2", "--node-rank", "1", *plan).last_line == (
            "error: node 1 has no plan plan.parquet; copy node 0's there: all nodes follow one plan"
        )


def test_a_manifest_that_changed_since_the_plan_is_refused(fcp: Fcp, folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"length": [5, 6, 7]}), tmp_path / "other.parquet")
    result = fcp("--manifest", str(tmp_path / "other.parquet"))
    assert "other.parquet is not the manifest that plan.parquet was made from, or it was changed since" in result.err


def test_a_resumed_run_keeps_its_settings_unless_told_otherwise(fcp: Fcp, tmp_path: Path) -> None:
    words = ("--run-dir", str(tmp_path), "--steps", "2", "--learning-rate", "0.01", "--synthetic", "--dry-run")
    (tmp_path / "launch.json").write_text(fcp(*words, "--json").out)
    resumed = shlex.split(fcp("--run-dir", str(tmp_path), "--resume", "--steps", "3", "--dry-run").out)
    trainer = resumed[resumed.index("fcp_cli.training.train") + 1 :]
    assert trainer[4:] == [
        *("--run-dir", str(tmp_path), "--steps", "3", "--learning-rate", "0.01", "--resume", "--quiet")
    ]


def test_a_run_directory_in_use_is_not_overwritten(fcp: Fcp, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("precious")
    result = fcp("--run-dir", str(tmp_path))
    assert result.last_line == (
        f"error: {tmp_path} already holds a run; continue it with --resume, or choose another --run-dir"
    )
    assert (tmp_path / "metrics.jsonl").read_text() == "precious"


_SCRIPT = """
import os, sys
from fcp_cli.plan.file import PlanReader
assert PlanReader(os.environ["FCP_PLAN"]).metadata.num_ranks == int(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "0":
    print("rank 0 was given", sys.argv[1:])
if os.environ["RANK"] == sys.argv[1]:
    sys.exit("I am the one")
"""


@pytest.mark.processes
@pytest.mark.distributed
def test_a_users_script_runs_on_all_ranks_and_the_rank_that_fails_is_named(folder: Path) -> None:
    (folder / "script.py").write_text(_SCRIPT)
    (folder / "console-script").write_text(f"#!{sys.executable}\n{_SCRIPT}")  # as pip installs them: no suffix
    launch = ("launch", "--plan", "plan2.parquet", "--")
    fine = run_fcp(*launch, "python", "./console-script", "none", "two words", folder=folder)
    started = (*launch, "script.py")
    assert (fine.returncode, fine.stdout) == (0, "rank 0 was given ['none', 'two words']\n")
    failed = run_fcp(*started, "1", folder=folder)
    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    host = socket.gethostname()
    assert lines[-3:-1] == [f"last lines of rank 1 on {host}:", "  I am the one"]
    assert lines[-1].startswith(f"error: rank 1 on {host} exited with status 1; its whole output is in ")
    assert Path(lines[-1].split(" is in ")[1]).read_text() == "I am the one\n"
    owners = map(read_owner, sorted((folder / "runs").glob("*script-*/owner.json")))
    assert [owner and owner.ended for owner in owners] == ["finished", "failed"]


_TELL_LAUNCHER = """
import json, os
from pathlib import Path
argv = Path(f"/proc/{os.getppid()}/cmdline").read_text().split(chr(0))[:-1]
print(json.dumps([argv, {name: os.environ[name] for name in os.environ if name.startswith(("FCP_", "OMP_"))}]))
"""


@pytest.mark.processes
@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_a_dry_run_prints_exactly_what_runs(folder: Path) -> None:
    (folder / "tell.py").write_text(_TELL_LAUNCHER)
    words = ("launch", "--plan", "plan1.parquet", "--run-dir", "told")
    (folder / "told" / "logs" / "start-001").mkdir(parents=True)  # of an earlier start
    printed = shlex.split(run_fcp(*words, "--dry-run", "--", "tell.py", "a b", folder=folder).stdout)
    done = run_fcp(*words, "--", "tell.py", "a b", folder=folder, **{SHARED: ""})  # it looks at torchrun's process
    assert done.returncode == 0, done.stderr
    argv, environment = json.loads(done.stdout)
    settings = dict(word.split("=", 1) for word in printed[1 : -len(argv)])
    assert (printed[0], printed[-len(argv) :]) == ("env", argv)
    assert f"--log-dir={folder}/told/logs/start-002" in argv
    assert settings.items() <= environment.items()
    assert json.loads((folder / "told" / "launch.json").read_text())["commands"][0]["argv"] == argv


def test_explain_says_why_each_variable_is_set_and_starts_nothing(
    fcp: Fcp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    result = fcp("--explain")
    assert result.status == 0
    assert all(len(line) <= 80 for line in result.out.splitlines())
    assert "your environment; fcp" in result.out
    document = json.loads(fcp("--explain", "--json").out)
    assert document["stack"] == "cpu"
    assert document["variables"][-1] == {
        "name": "OMP_NUM_THREADS",
        "value": "3",
        "reason": "threads of a rank; torchrun would give it one",
        "source": "your environment; fcp would set 1",
        "set_by_fcp": False,
    }
    assert not (folder / "runs" / "qwen3-tiny-001").exists()


def test_the_first_run_of_a_plan_is_probed_and_a_later_one_in_its_directory_is_not(
    fcp: Fcp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.py").write_text("")

    def probe() -> tuple[str, str, bool]:
        document = json.loads(fcp("--run-dir", "mine", "--explain", "--json", "--", "mine.py").out)
        (found,) = (variable for variable in document["variables"] if variable["name"] == "FCP_PROBE")
        return found["value"], found["source"], found["set_by_fcp"]

    def hash_of_plan() -> str:
        return str(json.loads(fcp("--dry-run", "--json", "--", "mine.py").out)["plan_hash"])

    first = ("1", "the first run of this plan in the run directory", True)
    assert probe() == first
    (folder / "mine").mkdir()
    write_launch(folder / "mine", plan_hash="that of another plan")
    assert probe() == first
    write_launch(folder / "mine", plan_hash=hash_of_plan())
    assert probe() == ("0", "the run directory has run this plan before", True)
    monkeypatch.setenv("FCP_PROBE", "1")
    assert probe() == ("1", "your environment", False)
    document = json.loads(fcp("--inject", "none", "--explain", "--json", "--", "mine.py").out)
    assert "FCP_PROBE" not in [variable["name"] for variable in document["variables"]]


def test_a_head_node_explains_the_environment_of_devices_that_it_does_not_have(
    fcp: Fcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(device: str = "auto") -> LocalDevices:
        raise RunError(f"there is no {device} device here")

    monkeypatch.setattr(machine, "find_machine", no_device)
    document = json.loads(fcp("--explain", "--device", "npu", "--nodes", "2", "--json").out)
    values = {variable["name"]: variable["value"] for variable in document["variables"]}
    assert document["stack"] == "npu"
    assert (values["HCCL_CONNECT_TIMEOUT"], values["HCCL_SOCKET_IFNAME"]) == ("1200", "")


_UNPLANNED = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
torch.optim.SGD([weight]).step()
print("trained")
"""


@pytest.mark.processes
@pytest.mark.distributed
def test_ranks_that_a_shell_script_starts_are_hooked_and_its_exit_status_is_that_of_the_launch(folder: Path) -> None:
    (folder / "unplanned.py").write_text(_UNPLANNED)
    (folder / "train.sh").write_text(
        f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node 2 $1 || exit 9\n"
    )
    (folder / "tell.py").write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[0])\n")
    fine = run_fcp("launch", "--inject", "env", "--", "bash", "train.sh", "tell.py", folder=folder)
    assert (fine.returncode, sorted(fine.stdout.splitlines())) == (0, ["0 tell.py", "1 tell.py"])
    refused = run_fcp("launch", "--inject", "env", "--", "bash", "train.sh", "unplanned.py", folder=folder)
    assert (refused.returncode, refused.stdout) == (9, "")
    assert "error: unplanned.py trains, but nothing in it follows the plan" in refused.stderr


@pytest.mark.processes
@pytest.mark.distributed
def test_a_script_that_trains_without_the_plan_ends_the_whole_job_with_one_line(folder: Path) -> None:
    (folder / "unplanned.py").write_text(_UNPLANNED)
    refused = run_fcp("launch", "--plan", "plan2.parquet", "--", "unplanned.py", folder=folder, **shared_by_scripts())
    assert (refused.returncode, refused.stdout) == (1, "")
    # rank 0 says so itself, unless another rank was quicker
    assert "unplanned.py trains, but nothing in it follows the plan" in refused.stderr.splitlines()[-1]
    bare = run_fcp("launch", "--plan", "plan1.parquet", "--inject", "none", "--", "unplanned.py", folder=folder)
    assert (bare.returncode, bare.stdout) == (0, "trained\n")


def test_preflight_checks_and_starts_nothing(fcp: Fcp, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    result = fcp("--preflight")
    assert (result.status, result.out.splitlines()[-1]) == (0, "preflight: no problem found")
    assert sorted(folder.rglob("*")) == before


def test_preflight_tells_all_that_is_wrong_with_its_mend(fcp: Fcp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", "3")
    result = fcp("--preflight")
    assert (result.status, result.out.splitlines()[-1]) == (0, "preflight: 1 warning")
    assert result.err.splitlines()[-1] == snapshot(
        "warning: Slurm allocated 3 nodes, but the job runs on 1; give --nodes 3, or submit with --nodes=1"
    )


def test_an_error_of_the_preflight_stops_the_launch_before_anything_is_written(
    fcp: Fcp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "addresses_of", lambda host: ("127.0.1.1",))
    words = ("--nodes", "2", "--node-rank", "0", "--master-addr", "node-a", "--run-dir", "never")
    result = fcp(*words)
    assert result.status == 1
    assert "error: --master-addr node-a is 127.0.1.1 on " in result.err
    assert not (folder / "never").exists()
    findings = json.loads(fcp("--preflight", *words, "--json").out)["findings"]
    assert findings[0]["severity"] == "error"
    missing = json.loads(fcp("--preflight", "--plan", "gone.parquet", "--json").out)["findings"]
    assert missing == snapshot(
        [
            {
                "severity": "error",
                "message": "there is no plan gone.parquet; make one with 'fcp plan MANIFEST -o gone.parquet'",
            }
        ]
    )


def test_a_script_that_plans_while_it_trains_is_told_what_for_and_where_its_plan_goes(fcp: Fcp) -> None:
    Path("mine.py").write_text("")
    words = ("--online", "--model", "qwen3-tiny", "--ranks", "2", "--global-batch-size", "8", "--run-dir", "r")
    printed = shlex.split(fcp(*words, "--dry-run", "--", "mine.py").out)
    variables = dict(word.split("=", 1) for word in printed if word.startswith("FCP_"))
    assert Path(variables["FCP_ONLINE"]).parts[-2:] == ("r", "online.json")
    assert Path(variables["FCP_PLAN"]).parts[-2:] == ("r", "plan.parquet")
    assert not Path("r").exists()


def test_a_script_without_a_plan_has_its_plan_made_in_the_run_folder(
    fcp: Fcp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    printed = shlex.split(fcp("--ranks", "2", "--model", "qwen3-tiny", "--dry-run", "--", "mine.py").out)
    variables = dict(word.split("=", 1) for word in printed if word.startswith("FCP_"))
    assert Path(variables["FCP_PLANNING"]).parts[-2:] == ("mine-001", "planning.json")
    assert Path(variables["FCP_PLAN"]).parts[-2:] == ("mine-001", "plan.parquet")
    assert "--nproc-per-node=2" in printed or "2" in printed[printed.index("--nproc-per-node") + 1]
    assert not Path("runs").exists()
    told = fcp("--dry-run", "--", "mine.py").last_line
    assert told == (
        "error: there is no accelerator and no plan here; give the number of CPU processes (--ranks 4), or a plan, which "
        "has one: --plan PLAN"
    )
    told = fcp("--ranks", "2", "--global-batch-size", "8", "--dry-run", "--", "mine.py").last_line
    assert told.startswith("error: --global-batch-size is for --online; a plan has its own")


@pytest.mark.processes
@pytest.mark.distributed
def test_a_loop_that_fcp_cannot_plan_for_does_not_train_without_a_plan(tmp_path: Path) -> None:
    (tmp_path / "unplanned.py").write_text(_UNPLANNED)
    refused = run_fcp("launch", "--ranks", "1", "--", "unplanned.py", folder=tmp_path, **shared_by_scripts())
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "unplanned.py trains without a plan, which fcp makes by itself for transformers' Trainer" in refused.stderr
