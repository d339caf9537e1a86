"""msrun's command lines: golden, and through msrun's own parser."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fcp_cli.launching.commands import interpreter_name, node_argv, path_of_python
from fcp_cli.launching.job import Job, join, variable
from fcp_cli.launching.program import through_entry
from tests.launching.jobs import local_job
from tests.launching.msrun_options import OPTIONS, parser
from tests.patience import PATIENCE_SECONDS

needs_mindspore = [
    pytest.mark.mindspore,
    pytest.mark.skipif(
        importlib.util.find_spec("mindspore") is None, reason="mindspore is not installed: make test-msrun"
    ),
]

JOB = local_job(launcher="msrun")
TWO_NODES = replace(JOB, num_nodes=2, master_addr="10.0.0.1", master_port=29501)
_PROGRAM, _ARGUMENTS = through_entry(("my script.py", "--note", "-- $x 'y' \"z\"\n", "--", "--worker_num=99"))
JOBS = {
    "one node": JOB,
    "two nodes": TWO_NODES,
    "logs": replace(JOB, log_dir=Path("/data/my run/logs/now")),
    "a script with awkward arguments": replace(TWO_NODES, program=_PROGRAM, arguments=_ARGUMENTS),
    "a script of MindSpore's": replace(JOB, program=("ms.py",), arguments=("--join", "False")),
    "a module": replace(JOB, program=("-m", "package.module"), arguments=("-m", "other")),
}


def test_on_one_node_everything_that_msrun_would_guess_is_stated() -> None:
    assert node_argv(JOB) == [
        "msrun",
        "--worker_num=4",
        "--local_worker_num=4",
        "--node_rank=0",
        "--master_addr=127.0.0.1",
        "--master_port=29500",
        "--log_dir=/data/my run/logs/msrun-node0",
        "--join=True",
        "--cluster_time_out=600",
        "--tail_worker_log=0",
        "python",
        "-m",
        "fcp_cli.runtime",
        "--",
        "-m",
        "fcp_cli.training.train",
        "--steps",
        "10",
    ]


def test_each_of_several_nodes_has_its_number_and_the_common_address() -> None:
    assert node_argv(TWO_NODES, node_rank=1)[1:7] == [
        "--worker_num=8",
        "--local_worker_num=4",
        "--node_rank=1",
        "--master_addr=10.0.0.1",
        "--master_port=29501",
        "--log_dir=/data/my run/logs/msrun-node1",
    ]


def test_a_node_s_number_may_be_known_to_the_node_alone() -> None:
    command = join(node_argv(TWO_NODES, node_rank=variable("SLURM_NODEID")))
    assert '--node_rank="$SLURM_NODEID"' in command


def test_a_script_of_mindspore_s_is_started_as_it_is() -> None:
    """Its scheduler runs the script, too."""
    argv = node_argv(JOBS["a script of MindSpore's"])
    assert argv[argv.index("python") :] == ["python", "ms.py", "--join", "False"]


@pytest.mark.parametrize(
    ("python", "name"),
    [("/venv/bin/python", "python"), ("/usr/bin/python3", "python3"), ("/usr/bin/python3.11", "python3")],
)
def test_the_interpreter_has_a_name_that_msrun_takes_for_one(python: str, name: str) -> None:
    assert interpreter_name(python) == name


def test_the_interpreter_s_folder_comes_first_on_path() -> None:
    assert path_of_python("/venv/bin/python", "/usr/bin") == "/venv/bin:/usr/bin"
    assert path_of_python("/venv/bin/python", "") == "/venv/bin"


@pytest.mark.parametrize("name", JOBS)
def test_msrun_s_recorded_parser_understands_every_command(name: str) -> None:
    argv = node_argv(JOBS[name], node_rank=0)
    require_understood(vars(parser().parse_args(argv[1:])), JOBS[name], argv)


def require_understood(parsed: dict[str, object], job: Job, argv: list[str]) -> None:
    """Every option arrived as it was meant, and the program's own words were left to the program."""
    assert parsed["join"] is True
    assert parsed["worker_num"] == job.num_nodes * job.processes_per_node
    assert parsed["local_worker_num"] == job.processes_per_node
    assert parsed["node_rank"] == 0
    assert parsed["master_port"] == job.master_port
    assert parsed["log_dir"] == str(job.log_dir or job.run_dir / "logs" / "msrun-node0")
    assert parsed["task_script"] == "python"
    assert parsed["task_script_args"] == argv[argv.index("python") + 1 :]


_REAL_PARSER = """
import argparse, json, sys
from mindspore.parallel.cluster import run
parsers = []
class Kept(argparse.ArgumentParser):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        parsers.append(self)
run.ArgumentParser = Kept
found = []
for argv in json.loads(sys.stdin.read()):
    sys.argv = argv
    found.append(vars(run.get_args()))
options = sorted(option for option in parsers[0]._option_string_actions if option not in ("-h", "--help"))
print(json.dumps({"options": options, "parsed": found}))
"""


class TestRealParser:
    """MindSpore's own, in a process of its own: importing it changes the environment."""

    pytestmark = needs_mindspore

    def test_it_understands_every_command(self) -> None:
        argvs = [node_argv(job) for job in JOBS.values()]
        found = real_parser(argvs)
        for parsed, job, argv in zip(found["parsed"], JOBS.values(), argvs, strict=True):
            require_understood(parsed, job, argv)

    def test_it_still_has_the_options_that_were_recorded(self) -> None:
        assert set(OPTIONS) <= set(real_parser([node_argv(JOB)])["options"])


def real_parser(argvs: list[list[str]]) -> dict[str, list[dict[str, object]]]:
    done = subprocess.run(
        [sys.executable, "-c", _REAL_PARSER],
        input=json.dumps(argvs),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, list[dict[str, object]]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
