"""`fcp jobs`: what becomes of started and submitted jobs, with the world outside played by one small class."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.launching.started.backend import JobBackend
from fcp_cli.launching.started.cancel import end, find_cancellation
from fcp_cli.launching.started.jobs import job_state, listed_state, log_of, require_run, started_runs
from fcp_cli.machine.identity import ProcessIdentity
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.owner import End, Owner
from fcp_cli.runs.ownership import own
from fcp_cli.runs.submission import Submission, write_submission


@dataclass
class Cluster(JobBackend):
    """Programs answer what they are told to; without an answer they are not there."""

    answers: dict[str, str] = field(default_factory=dict)
    typed: list[list[str]] = field(default_factory=list)
    stopped: list[ProcessIdentity] = field(default_factory=list)
    host: str = os.uname().nodename

    def run(self, argv: Sequence[str]) -> str:
        self.typed.append(list(argv))
        if argv[0] not in self.answers:
            raise RunError(f"there is no {argv[0]} on this machine; ask where the job was submitted from")
        return self.answers[argv[0]]

    def stop(self, process: ProcessIdentity) -> bool:
        self.stopped.append(process)
        return True


def cancel(run_dir: Path, cluster: Cluster) -> str:
    return end(find_cancellation(run_dir, cluster), cluster)


def run_of(folder: Path, submission: Submission | None = None, *, ended: End | None = None) -> Path:
    """A run directory as `fcp launch` leaves it; how it ended stands there, where that is given."""
    run_dir = folder / "runs" / "tiny-001"
    (run_dir / "logs").mkdir(parents=True)
    RunPaths(run_dir=run_dir).launch.write_text("{}")
    if submission is not None:
        write_submission(run_dir, submission)
    if ended is not None:
        with own(run_dir) as owned:
            owned.ended = ended
    return run_dir


SLURM = Submission(target="slurm", name="tiny-001", job_id="4711")
JOBSET = Submission(target="jobset", name="tiny-001", namespace="training")


def test_a_waiting_job_has_slurms_word_and_reason(tmp_path: Path) -> None:
    cluster = Cluster({"squeue": "PENDING Resources\n"})
    state = job_state(run_of(tmp_path, SLURM), cluster)
    assert (state.where, state.state, state.is_over) == ("slurm 4711", "PENDING (Resources)", False)
    assert cluster.typed[0][:2] == ["squeue", "--jobs=4711"]


def test_a_job_that_left_the_queue_is_found_in_the_accounts(tmp_path: Path) -> None:
    state = job_state(run_of(tmp_path, SLURM), Cluster({"squeue": "", "sacct": "CANCELLED by 1000\n"}))
    assert (state.state, state.is_over) == ("CANCELLED by 1000", True)


def test_a_run_that_ended_needs_no_scheduler(tmp_path: Path) -> None:
    assert job_state(run_of(tmp_path, SLURM, ended="finished"), Cluster()).state == "finished"


def test_where_the_scheduler_cannot_be_asked_the_state_is_unknown(tmp_path: Path) -> None:
    assert job_state(run_of(tmp_path, SLURM), Cluster()).state == "unknown"


def test_the_latest_condition_that_holds_is_the_state_on_kubernetes(tmp_path: Path) -> None:
    conditions = [
        {"type": "StartupPolicyCompleted", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        {"type": "Completed", "status": "True", "lastTransitionTime": "2026-01-01T02:00:00Z"},
        {"type": "Failed", "status": "False", "lastTransitionTime": "2026-01-01T03:00:00Z"},
    ]
    cluster = Cluster({"kubectl": json.dumps({"status": {"conditions": conditions}})})
    assert job_state(run_of(tmp_path, JOBSET), cluster).state == "Completed"
    assert cluster.typed == [
        ["kubectl", "get", "--namespace=training", "--output=json", "--", "jobsets.jobset.x-k8s.io", "tiny-001"]
    ]


def test_volcano_has_a_phase_and_a_new_object_nothing_yet(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, Submission(target="volcano", name="tiny-001"))
    assert job_state(run_dir, Cluster({"kubectl": '{"status": {"state": {"phase": "Running"}}}'})).state == "Running"
    assert job_state(run_dir, Cluster({"kubectl": "{}"})).state == "Pending"


def test_slurm_ends_a_running_job_after_its_step_and_a_waiting_one_at_once(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, SLURM)
    running = Cluster({"squeue": "RUNNING None\n", "scancel": ""})
    assert cancel(run_dir, running) == "asked Slurm to end job 4711"
    assert running.typed[-1] == ["scancel", "--signal=TERM", "--batch", "--", "4711"]
    waiting = Cluster({"squeue": "PENDING Priority\n", "scancel": ""})
    cancel(run_dir, waiting)
    assert waiting.typed[-1] == ["scancel", "--", "4711"]


def test_an_object_is_deleted_from_its_namespace(tmp_path: Path) -> None:
    cluster = Cluster({"kubectl": "{}"})
    assert cancel(run_of(tmp_path, JOBSET), cluster) == "deleted the jobset tiny-001"
    assert cluster.typed[-1] == [
        "kubectl",
        "delete",
        "--namespace=training",
        "--",
        "jobsets.jobset.x-k8s.io",
        "tiny-001",
    ]


def test_a_local_run_is_asked_through_its_launcher(tmp_path: Path) -> None:
    run_dir, cluster = run_of(tmp_path), Cluster()
    with own(run_dir):
        assert job_state(run_dir, cluster).state == "running"
        cancel(run_dir, cluster)
        assert cluster.stopped == [ProcessIdentity.of(os.getpid())]
        with pytest.raises(RunError, match=r"runs on .*; cancel it there$"):
            cancel(run_dir, Cluster(host="another"))


def test_what_is_over_is_not_cancelled(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"tiny-001 is failed: there is nothing to cancel$"):
        cancel(run_of(tmp_path, ended="failed"), Cluster())


def test_the_log_is_the_newest_of_rank_0_and_slurms_own_where_it_has_one(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, SLURM)
    logs = RunPaths(run_dir=run_dir).logs
    with pytest.raises(RunError, match="has no output yet"):
        log_of(run_dir, Cluster())
    (logs / "slurm-4711.log").write_text("of the script\n")
    (logs / "slurm-99.log").write_text("of another job\n")
    assert "".join(log_of(run_dir, Cluster())) == "of the script\n"


def test_a_pod_is_asked_where_the_run_directory_holds_no_log(tmp_path: Path) -> None:
    cluster = Cluster({"kubectl": "step 1/4\n"})
    assert "".join(log_of(run_of(tmp_path, JOBSET), cluster)) == "step 1/4\n"
    assert cluster.typed[0][2].startswith("--selector=jobset.sigs.k8s.io/jobset-name=tiny-001,")


def test_runs_are_found_by_their_path_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert started_runs() == [Path("runs/tiny-001")] == [require_run(Path("tiny-001"))]
    with pytest.raises(
        RunError, match="gone is not a run that 'fcp launch' started; 'fcp jobs' lists those below runs"
    ):
        require_run(Path("gone"))


def written(run_dir: Path, name: str, document: dict[str, Any]) -> Path:
    """The run with a file that somebody else wrote."""
    (run_dir / name).write_text(json.dumps(document))
    return run_dir


def owner_of(run_dir: Path, *, ended: Any = None, **changes: Any) -> Path:
    """The run as this very process owns it, but for what is changed of its identity; `process`: all of it."""
    facts = json.loads(Owner.this_process("").text())
    process = changes.pop("process", facts["process"] | changes)
    return written(run_dir, "owner.json", facts | {"ended": ended, "process": process})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"process": None}, "its owner.json has no start time or boot id, so process .*: kill -TERM [0-9]+$"),
        ({"boot_id": "0" * 36}, "was launched before the last boot of .*nothing was signalled"),
        ({"started_ticks": 1}, r"its launcher, process [0-9]+, has ended: there is nothing to cancel$"),
        ({"pid": 1}, "was launched by process 1, the first of its container; stop the container$"),
        ({"pid": 0}, "owner.json is damaged: process.pid is 0; it must be the number of a process"),
        ({"pid": -1}, "owner.json is damaged: process.pid is -1; "),
        ({"pid": 2**40}, "owner.json is damaged: process.pid is 1099511627776; "),
        ({"pid": True}, "owner.json is damaged: process.pid is True; "),
        ({"pid": "4711"}, "owner.json is damaged: process.pid is '4711'; "),
        ({"ended": ["x"]}, r"owner.json is damaged: ended is \['x'\]; "),
    ],
)
def test_no_process_is_signalled_that_is_not_known_for_certain(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    run_dir, cluster = owner_of(run_of(tmp_path), **changes), Cluster()
    with pytest.raises(RunError, match=message) as failure:
        cancel(run_dir, cluster)
    assert cluster.stopped == []
    assert len(str(failure.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"target": "pytorchjob", "name": "--all", "namespace": "prod"}, "name is '--all'; it must be a name of Kuber"),
        ({"target": "jobset", "name": "a", "namespace": "--all-namespaces"}, "namespace is '--all-namespaces'; it mu"),
        ({"target": "jobset", "name": "a,b"}, "name is 'a,b'; it must be a name of Kubernetes"),
        ({"target": "slurm", "name": "a", "job_id": "--user=root"}, "job_id is '--user=root'; it must be the number"),
        ({"target": "slurm", "name": "a", "job_id": "1,2"}, "job_id is '1,2'; it must be the number of a Slurm job"),
        ({"target": "slurm", "name": "a", "job_id": "4711\n"}, "job_id is '4711.n'; it must be the number of a Slurm"),
        ({"target": "slurm", "name": "a"}, "a job of slurm has job_id ''"),
        ({"target": ["slurm"], "name": "a"}, r"target is \['slurm'\]; it must be a target of fcp launch"),
        ({"target": "-x", "name": "a"}, "target is '-x'; it must be a target of fcp launch"),
        ({"target": "slurm", "name": "a", "job_id": "1", "argv": []}, "unknown key argv"),
    ],
)
def test_nothing_of_a_run_folder_reaches_a_command_that_its_grammar_refuses(
    tmp_path: Path, document: dict[str, Any], message: str
) -> None:
    run_dir = written(run_of(tmp_path), "job.json", {"format": "fcp-job/1", **document})
    cluster = Cluster({"squeue": "RUNNING None\n", "scancel": "", "kubectl": "{}"})
    for command in (cancel, log_of, job_state):
        with pytest.raises(RunError, match=f"job.json is damaged: {message}"):
            command(run_dir, cluster)
    assert cluster.typed == []


def test_what_would_be_ended_is_described_first(tmp_path: Path) -> None:
    run_dir, cluster = owner_of(run_of(tmp_path)), Cluster({"squeue": "RUNNING None\n", "kubectl": "{}"})
    run, process, state = find_cancellation(run_dir, cluster).describe()
    assert (run, state) == (f"run    {run_dir}", "state  running, 0 steps done")
    assert process.startswith(f"where  process {os.getpid()} on {cluster.host}: ")
    write_submission(run_dir, SLURM)
    assert find_cancellation(run_dir, cluster).describe()[1] == "where  Slurm job 4711 (tiny-001)"
    write_submission(run_dir, JOBSET)
    assert find_cancellation(run_dir, cluster).describe()[1] == "where  jobset tiny-001 in namespace training"
    assert cluster.stopped == []


def test_a_damaged_run_is_listed_with_its_reason(tmp_path: Path) -> None:
    state = listed_state(owner_of(run_of(tmp_path), pid=2**40), Cluster())
    assert (state.state, state.where, state.steps) == ("unreadable", "", 0)
    assert "owner.json is damaged: process.pid is 1099511627776" in state.problem


def test_scripts_that_a_site_starts_itself_are_no_object_of_kubernetes(tmp_path: Path) -> None:
    run_dir, cluster = run_of(tmp_path, Submission(target="scripts", name="tiny-001")), Cluster({"kubectl": "{}"})
    assert job_state(run_dir, cluster).state == "unknown"
    with pytest.raises(RunError, match=r"has not been started: there is nothing to cancel$"):
        cancel(run_dir, cluster)
    assert cluster.typed == []


@pytest.mark.parametrize("answer", ["no JSON", "[]", '{"status": {"conditions": [5]}}', '{"status": 5}'])
def test_an_answer_that_is_not_of_kubernetes_leaves_the_state_unknown(tmp_path: Path, answer: str) -> None:
    assert job_state(run_of(tmp_path, JOBSET), Cluster({"kubectl": answer})).state == "unknown"


def test_a_log_that_is_a_pipe_or_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, SLURM)
    start = RunPaths(run_dir=run_dir).logs / "start"
    (start / "torchrun.log").mkdir(parents=True)
    os.mkfifo(start / "other.log")
    os.mkfifo(RunPaths(run_dir=run_dir).logs / "slurm-4711.log")
    with pytest.raises(RunError, match=r"has no output yet: there is no log in"):
        log_of(run_dir, Cluster())
