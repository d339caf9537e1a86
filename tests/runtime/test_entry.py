"""`python -m fcp_cli.runtime` and the sitecustomize, as real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from fcp_cli.errors import RunError
from fcp_cli.runtime.inject import _refuse_to_train
from tests.patience import PATIENCE_SECONDS
from tests.ports import unused_port
from tests.runtime.launch import ROOT
from tests.runtime.plans import Row, write_plan

pytestmark = [pytest.mark.torch, pytest.mark.processes]

SITE = ROOT / "fcp_cli" / "runtime" / "site"
TELL = """
import json, sys
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "name": __name__, "torch": "torch" in sys.modules}))
"""
TRAIN = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
torch.optim.SGD([weight]).step()
"""
# Called last of all, when the interpreter is about to end; gloo's threads must be gone by then.
TELL_AT_EXIT = """
import atexit
def tell():
    import torch.distributed as dist
    print("ends with a process group:", dist.is_initialized())
atexit.register(tell)
"""


def run(*words: str, folder: Path, entry: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FCP_", "MS_", "RANK"))}
    return subprocess.run(
        [sys.executable, *(("-m", "fcp_cli.runtime") if entry else ()), *words],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "tell.py").write_text(TELL)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize("separator", [(), ("--",)])
def test_a_script_finds_itself_as_if_python_had_started_it(folder: Path, separator: tuple[str, ...]) -> None:
    words = ("scripts/tell.py", "--lr", "a b", "--", "-m")
    plain = json.loads(run(*words, folder=folder, entry=False).stdout)
    assert json.loads(run(*separator, *words, folder=folder, FCP_PLAN="plan").stdout) == plain
    assert (plain["name"], plain["torch"]) == ("__main__", False)


def test_a_module_too(folder: Path) -> None:
    words = ("-m", "scripts.tell", "x")
    plain = json.loads(run(*words, folder=folder, entry=False).stdout)
    assert json.loads(run("--", *words, folder=folder, FCP_PLAN="plan").stdout) == plain


def test_the_exit_status_and_the_traceback_of_the_script_are_its_own(folder: Path) -> None:
    (folder / "fails.py").write_text("import sys\nsys.exit(7)\n")
    (folder / "raises.py").write_text("raise ValueError('mine')\n")
    assert run("--", "fails.py", folder=folder, FCP_PLAN="plan").returncode == 7
    raises = run("--", "raises.py", folder=folder, FCP_PLAN="plan")
    assert (raises.returncode, raises.stderr.splitlines()[-1]) == (1, "ValueError: mine")


def test_a_script_that_fails_ends_behind_its_exit_handlers_and_before_the_interpreters_teardown(folder: Path) -> None:
    (folder / "fails.py").write_text(
        "import atexit, os, sys\n"
        "class Late:\n"
        "    def __del__(self, write=os.write):\n"
        "        write(1, b'in teardown\\n')\n"
        "sys.late = Late()\n"
        "atexit.register(print, 'in an exit handler')\n"
        "sys.exit('mine' if sys.argv[1:] else 0)\n"
    )
    failed = run("--", "fails.py", "now", folder=folder, FCP_PLAN="plan")
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "in an exit handler\n", "mine\n")
    assert run("--", "fails.py", folder=folder, FCP_PLAN="plan").stdout == "in an exit handler\nin teardown\n"


ENDS = {
    "that still loads ahead": (
        "def load():\n"
        "    while True:\n"
        "        torch.ones(300, 300).sum()\n"
        "for _ in range(4):\n"
        "    threading.Thread(target=load, name='fcp-loader', daemon=True).start()\n"
        "time.sleep(0.1)\n"
    ),
    "of gloo that DDP keeps": (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "sys.kept = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "sys.kept(torch.ones(1, 2)).sum().backward()\n"
        "caught = []\n"
        "def wait(_):\n"
        "    while threading.current_thread() is not threading.main_thread():\n"
        "        caught.append(time.sleep(0.01))\n"
        "while not caught:\n"
        "    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(wait)\n"
        "    time.sleep(0.01)\n"
    ),
}


@pytest.mark.parametrize("thread", ENDS)
def test_a_finished_rank_is_not_aborted_for_a_thread(folder: Path, thread: str) -> None:
    (folder / "finished.py").write_text(
        "import sys, threading, time, torch\n"
        f"{ENDS[thread]}"
        "sys.log = open('log', 'w')\n"
        "sys.log.write('complete')\n"
        "print('done')\n"
    )
    ended = run("--", "finished.py", folder=folder, FCP_PLAN="plan")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
    assert (folder / "log").read_text() == "complete"


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ((), {"FCP_PLAN": "p"}, "usage: python -m fcp_cli.runtime -- SCRIPT ARGS   (or -- -m MODULE ARGS)"),
        (("--", "nope.py"), {"FCP_PLAN": "p"}, "there is no script nope.py"),
        (("--", "train.py"), {}, "FCP_PLAN names no plan; set it, or start the script with 'fcp launch --plan PLAN'"),
    ],
)
def test_what_cannot_be_started_is_one_line(
    folder: Path, words: tuple[str, ...], environment: dict[str, Any], message: str
) -> None:
    done = run(*words, folder=folder, **environment)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_a_script_that_trains_without_the_plan_is_stopped_before_its_first_optimizer_step(folder: Path) -> None:
    done = run("--", "train.py", folder=folder, FCP_PLAN="/data/plan.parquet")
    assert done.returncode == 1
    assert done.stderr == (
        "error: train.py trains, but nothing in it follows the plan /data/plan.parquet: it neither iterates over "
        "fcp_cli.runtime.steps nor trains through a framework that fcp hooks; see docs/how-to/training-loop.md, or "
        "start it without hooks by 'fcp launch --inject none'\n"
    )
    by_environment = run("train.py", folder=folder, entry=False, FCP_PLAN="/data/plan.parquet", RANK="0",
                         PYTHONPATH=str(SITE))  # fmt: skip
    assert (by_environment.returncode, by_environment.stderr) == (1, done.stderr)


def test_a_process_that_trains_beside_the_ranks_of_a_job_is_named(folder: Path) -> None:
    """As `accelerate launch` starts a script on a CPU unless it is told how many ranks there are."""
    done = run("train.py", folder=folder, entry=False, FCP_PLAN="/data/plan.parquet", PYTHONPATH=str(SITE))
    assert (done.returncode, done.stderr) == (
        1,
        "error: train.py trains in a process that is not a rank (RANK is not set), and would train without the plan "
        "/data/plan.parquet; have its launcher start the plan's ranks, as 'torchrun --nproc-per-node N' does\n",
    )


def test_where_accelerate_started_it_the_flag_is_named_that_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # set once more by what is called, and put back here
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _refuse_to_train(cast(ModuleType, SimpleNamespace(register_optimizer_step_pre_hook=hooks.append)))
    with pytest.raises(RunError) as refused:
        hooks[0]()
    assert str(refused.value).endswith(
        "; without accelerators 'accelerate launch' starts the plan's ranks by '--multi_gpu --num_processes N' alone"
    )


def test_a_script_that_follows_it_is_not_even_with_optimizer_hooks_of_its_own(folder: Path) -> None:
    plan = write_plan(folder / "plan.parquet", [[Row([0], [4])]], num_ranks=1)
    (folder / "follows.py").write_text(
        f"{TELL_AT_EXIT}"
        "from torch.optim.optimizer import register_optimizer_step_pre_hook\n"
        "register_optimizer_step_pre_hook(lambda *_: None)\n"
        "from fcp_cli import runtime\n"
        "for step in runtime.steps(fetch=lambda row: [1, 2, 3, 4]):\n"
        "    for batch in step:\n"
        f"{''.join(f'        {line}' + chr(10) for line in TRAIN.split(chr(10)))}"
        "        print('trained', batch.input_ids.tolist())\n"
    )
    done = run("--", "follows.py", folder=folder, FCP_PLAN=str(plan))
    assert (done.returncode, done.stdout) == (0, "trained [[1, 2, 3, 4]]\nends with a process group: False\n"), (
        done.stderr
    )


def test_a_rank_hands_on_whole_lines_so_that_those_of_several_ranks_do_not_mix(folder: Path) -> None:
    """Seen through a socket that keeps one write apart from the next; launchers start ranks by `python -u`."""
    (folder / "speak.py").write_text("import sys\nprint('rank', 0, 'speaks')\nprint('and', 'warns', file=sys.stderr)\n")
    received, sent = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with received, sent:
        subprocess.run(
            [sys.executable, "-u", "-m", "fcp_cli.runtime", "--", "speak.py"],
            cwd=folder,
            env={**os.environ, "FCP_PLAN": "plan"},
            stdout=sent.fileno(),
            stderr=sent.fileno(),
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        received.setblocking(False)
        assert [received.recv(100), received.recv(100)] == [b"rank 0 speaks\n", b"and warns\n"]


def test_only_ranks_of_a_planned_job_are_prepared_by_the_environment_and_the_sites_own_customisation_runs(
    folder: Path,
) -> None:
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text("print('of the site')\nvalue = 3\n")
    (folder / "look.py").write_text(
        "import sys, sitecustomize\n"
        "print(sitecustomize.value, 'fcp_cli.runtime.inject' in sys.modules, 'torch' in sys.modules)\n"
    )
    path = os.pathsep.join([str(SITE), str(folder / "own")])
    for environment, prepared in (({}, False), ({"RANK": "0"}, False), ({"RANK": "0", "FCP_PLAN": "p"}, True)):
        done = run("look.py", folder=folder, entry=False, PYTHONPATH=path, **environment)
        assert done.stdout == f"of the site\n3 {prepared} False\n", done.stderr


def test_a_python_without_fcp_ends_instead_of_training_unplanned(folder: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(SITE)!r}); import sitecustomize; print('on')",
        ],
        cwd=folder,
        env={"RANK": "0", "FCP_PLAN": "p"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: fcp cannot be imported by {sys.executable}, which runs this rank (")


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["entry", "environment"])
def test_ranks_that_msrun_started_meet_in_torch_and_its_scheduler_ends_at_once(folder: Path, how: str) -> None:
    """With the variables that msrun sets, but without MindSpore."""
    (folder / "meet.py").write_text(
        f"{TELL_AT_EXIT}"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "print('rank', dist.get_rank(), 'of', dist.get_world_size(), 'sum', int(total))\n"
    )
    common = {
        "FCP_PLAN": "plan",
        "MS_WORKER_NUM": "2",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(unused_port() - 1),
        "RANK_ID": "0",
    }
    if how == "environment":
        common["PYTHONPATH"] = str(SITE)
    words = ["-m", "fcp_cli.runtime", "--", "meet.py"] if how == "entry" else ["meet.py"]
    roles = [
        {"MS_ROLE": "MS_SCHED"},
        *({"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "DEVICE_ID": str(rank)} for rank in range(2)),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **common, **role},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in roles
    ]
    results = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert [out for out, _ in results] == [
        "",
        *(f"rank {rank} of 2 sum 3\nends with a process group: False\n" for rank in range(2)),
    ]
