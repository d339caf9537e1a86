"""Targets: what belongs to which, hostfiles, a site's own templates, files that are not overwritten."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.launching import node
from fcp_cli.launching.commands import document_of
from fcp_cli.launching.environment import job_variables
from fcp_cli.launching.job import place
from fcp_cli.launching.request import ClusterOptions
from fcp_cli.launching.supervise import JobOutcome
from fcp_cli.launching.target_options import (
    choose_target,
    cluster_machine,
    for_cluster,
    option_values,
    read_hostfile,
    split_variables,
)
from fcp_cli.launching.targets import TARGETS, job_files, job_name, submit, template_values, write_files, yaml_scalar
from fcp_cli.models.cluster import shipped_profile
from fcp_cli.runs import owner
from fcp_cli.util.console import Assumptions
from fcp_cli.util.files import json_text
from fcp_cli.util.machine import UNKNOWN_MACHINE
from tests.launching.cluster_jobs import FakeCluster, allocation, cluster_job
from tests.launching.jobs import CPU, plan_metadata


def test_the_options_tell_the_target() -> None:
    assert choose_target(ClusterOptions()) == "local"
    assert choose_target(ClusterOptions(hostfile=Path("hosts"))) == "scripts"
    assert choose_target(ClusterOptions(sbatch_option=("--partition=gpu",))) == "slurm"
    assert choose_target(ClusterOptions(image="fcp:1")) == "trainjob"
    assert choose_target(ClusterOptions(image="fcp:1", target="jobset")) == "jobset"


def test_a_hostfile_takes_comments_and_slots(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# rack 1\nnode-a slots=8\n\n  10.0.0.2   # spare\nroot@node-c\n[fe80::1%eth0]\nfe80::2\n")
    assert read_hostfile(hosts) == ("node-a", "10.0.0.2", "root@node-c", "[fe80::1%eth0]", "fe80::2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\na\n", "line 3: a is already in line 1; list each node once"),
        ("# nobody\n", "lists no host; write one address a line, node 0 first"),
        ("127.0.1.1\nb\n", "line 1: 127.0.1.1 means another machine on each of 2 nodes; give its address"),
        ("a\nlocalhost\n", "line 2: localhost means another machine on each of 2 nodes; give its address"),
        ("a\n-oProxyCommand=x\n", "line 2: '-oProxyCommand=x' is not a host; write a name or an address, e.g. node0"),
        ("-l@b\n", "line 1: '-l@b' is not a host; write a name or an address, e.g. node0"),
        ("a$(x)\n", "line 1: 'a$(x)' is not a host; write a name or an address, e.g. node0"),
    ],
)
def test_a_hostfile_that_cannot_be_meant_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    with pytest.raises(UsageError) as error:
        read_hostfile(hosts)
    assert str(error.value).endswith(message)


def test_a_site_changes_one_part_of_a_shipped_template(tmp_path: Path) -> None:
    template = tmp_path / "my_site.sbatch.j2"
    template.write_text(
        '{% extends "job.sbatch.j2" %}\n'
        "{% block directives %}\n{{ super() }}#SBATCH --account=ml\n{% endblock %}\n"
        "{% block setup %}\nmodule load fcp\n{% endblock %}\n"
    )
    shipped, own = (job_files(TARGETS["slurm"], cluster_job(), template=path) for path in (None, template))
    assert list(own) == ["job.sbatch"]
    added = set(own["job.sbatch"].splitlines()) - set(shipped["job.sbatch"].splitlines())
    assert added == {"#SBATCH --account=ml", "module load fcp"}


def test_a_site_writes_its_own_template(tmp_path: Path) -> None:
    template = tmp_path / "bsub.j2"
    template.write_text("#BSUB -n {{ num_nodes }} -J {{ job_name }}\n{{ command | lines(2) }}\n")
    assert job_files(TARGETS["slurm"], cluster_job(), template=template)["job.sbatch"].startswith(
        "#BSUB -n 2 -J qwen3-8b-001\n/shared/venv/bin/python -m fcp_cli.launching.node \\\n  --node-rank="
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{{ job_nme }}\n", "line 2: 'job_nme' is undefined; did you mean 'job_name'?"),
        ("{{ zebra }}", "line 1: 'zebra' is undefined; docs/reference/templates.md lists the variables of a template"),
        ("a\n\n{% if %}\n", "line 3: Expected an expression, got 'end of statement block'"),
        ("{{ plan | shout }}", "line 1: No filter named 'shout'."),
        ("a\n{{ num_nodes // 0 }}", "line 2: ZeroDivisionError: integer division or modulo by zero"),
        ("a\n{% include 'b' %}", "line 2: there is no template b to extend or include"),
    ],
)
def test_a_mistake_in_a_template_is_one_line_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    template = tmp_path / "site.sh.j2"
    template.write_text(text)
    with pytest.raises(UsageError) as error:
        job_files(TARGETS["scripts"], cluster_job(), template=template)
    assert str(error.value) == f"{template}, {message}"


@pytest.mark.parametrize(
    ("base", "known"), [("job.sbatch.j2", "directives, setup"), ("trainjob.yaml.j2", "metadata, pod_spec")]
)
def test_a_block_that_the_extended_template_does_not_have_is_refused(tmp_path: Path, base: str, known: str) -> None:
    site, team = tmp_path / "site.j2", tmp_path / "team.j2"
    site.write_text(f'{{% extends "{base}" %}}\n{{% block setups %}}\nmodule load cuda\n{{% endblock %}}\n')
    target = TARGETS["slurm" if "sbatch" in base else "trainjob"]
    with pytest.raises(UsageError) as error:
        job_files(target, cluster_job(), template=site)
    assert str(error.value) == f"{site}: there is no block setups to replace, only {known}"
    site.write_text(
        f'{{% extends "{base}" %}}\n{{% block {known.split(", ")[1]} %}}{{% block own %}}{{% endblock %}}{{% endblock %}}\n'
    )
    team.write_text('{% extends "site.j2" %}\n{% block own %}\n# of the team\n{% endblock %}\n')
    assert "# of the team" in next(iter(job_files(target, cluster_job(), template=team).values()))


def test_the_image_of_a_slurm_job_is_pyxis_container_with_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/host")
    made = replace(cluster_job(), target="slurm", plan=Path("/data/plan.parquet"))
    made = replace(made, variables=job_variables(made, os.environ))
    assert made.variables[-1].name == "LD_LIBRARY_PATH"
    text = job_files(
        TARGETS["slurm"], for_cluster(ClusterOptions(image="nvcr.io#nvidia/fcp:1"), made, None, Assumptions())
    )["job.sbatch"]
    assert (
        " '--container-image=nvcr.io#nvidia/fcp:1' '--container-workdir=/shared/my code' '--container-mounts=/data:/data,"
        "/shared/my code:/shared/my code,/shared/runs/qwen3-8b-001:/shared/runs/qwen3-8b-001' bash -c start_ranks_of_node"
    ) in text
    assert "    exec python -m fcp_cli.launching.node \\\n" in text
    assert "/of/the/host" not in text
    given = ClusterOptions(image="/images/fcp.sqsh", mount=("/shared:/shared:ro",))
    assert option_values(given, TARGETS["slurm"], made, Assumptions())["srun_options"] == [
        "--container-image=/images/fcp.sqsh",
        "--container-workdir=/shared/my code",
        "--container-mounts=/shared:/shared:ro",
    ]
    host = for_cluster(ClusterOptions(), made, None, Assumptions())
    assert "/of/the/host" in job_files(TARGETS["slurm"], host)["job.sbatch"]


def test_a_template_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the template .*no\.j2: No such file"):
        job_files(TARGETS["slurm"], cluster_job(), template=tmp_path / "no.j2")


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "job"
    files = {"a": "1", "b": "2"}
    write_files(folder, files, overwrite=False)
    (folder / "a").unlink()
    with pytest.raises(FcpError, match=r"/b is there already; remove it, or choose"):
        write_files(folder, files, overwrite=False)
    assert not (folder / "a").exists()  # nothing is half-written
    write_files(folder, {"b": "3"}, overwrite=True)
    assert (folder / "b").read_text() == "3"


def test_a_disk_that_fills_up_leaves_no_part_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, text: str, **more: Any) -> int:
        if "last" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, text, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(FcpError, match=r"cannot write .*last: No space left"):
        write_files(tmp_path / "job", {"first": "1", "last": "2"}, overwrite=False)
    assert not (tmp_path / "job").exists()


@pytest.mark.processes
def test_what_slurm_says_against_a_job_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(tmp_path)
    cluster.add("sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid partition" >&2; exit 1')
    monkeypatch.setenv("PATH", cluster.environment()["PATH"])
    with pytest.raises(RunError) as error:
        submit(("sbatch", "job.sbatch"))
    assert str(error.value) == snapshot("sbatch did not take the job: Batch job submission failed: Invalid partition")


def test_names_are_what_kubernetes_takes() -> None:
    assert job_name("Qwen3_VL 8B.001") == "qwen3-vl-8b-001"
    assert job_name("7b") == "fcp-7b"
    assert job_name("ß/") == "fcp"
    assert len(job_name("x" * 99)) == 40


@pytest.mark.parametrize("value", ["yes", "a: b #c", "é\u2028\x7f\x85\n\r\t\\\"'", "😀\ufeff", "", "1e3"])
def test_yaml_gives_every_text_back(value: str) -> None:
    import yaml

    assert yaml.safe_load(f"key: {yaml_scalar(value)}") == {"key": value}
    assert "\n" not in yaml_scalar(value)


@pytest.mark.processes
def test_a_node_says_what_its_launcher_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--node-rank=1", f"--log-dir={tmp_path / 'logs'}", "--", sys.executable, "-c"]
    assert node.main([*words, "import sys; print('no such port'); sys.exit(3)"]) == 1
    assert capfd.readouterr().err == (
        "last lines of torchrun:\n  no such port\nerror: torchrun failed with status 3 before any rank did; see "
        f"{tmp_path}/logs/torchrun.log\n"
    )
    assert node.main([*words, "pass"]) == 0


@pytest.mark.processes
def test_a_pod_that_comes_back_shows_and_blames_its_own_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs" / "job-node0"
    ranks = (
        "import pathlib, sys; name = sys.argv[1]; logs = pathlib.Path(sys.argv[2][10:]) / name / 'attempt_0' / '0';"
        "logs.mkdir(parents=True); (logs / 'stdout.log').write_text(name);"
        "(logs / 'stderr.log').write_text(f'error: {name}'); print('local_rank: 0'); sys.exit(1)"
    )
    for name in ("z-first", "a-second"):  # torchrun's names are drawn at random
        words = ["--node-rank=0", f"--log-dir={logs}", "--", sys.executable, "-c", ranks, name, f"--log-dir={logs}"]
        assert node.main(words) == 1
        shown = capfd.readouterr()
        assert shown.out == name
        assert shown.err.endswith(f"{logs}{'' if name == 'z-first' else '-restart1'}/torchrun.log\n")


@pytest.mark.processes
def test_a_node_knows_its_own_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "eth7")
    monkeypatch.delenv("FOUND", raising=False)
    monkeypatch.setattr(node, "interface_towards", {"10.0.0.1": "eth0"}.get)
    told = tmp_path / "told"
    options = ["--interface-for=FOUND", "--interface-for=OF_THE_USER", "--master-addr=10.0.0.1"]
    script = f"import os; open({str(told)!r}, 'w').write(os.environ['FOUND'] + ' ' + os.environ['OF_THE_USER'])"
    command = [sys.executable, "-c", script]
    assert node.main(["--node-rank=0", f"--log-dir={tmp_path}", *options, "--", *command]) == 0
    assert told.read_text() == "eth0 eth7"


@pytest.mark.processes
def test_a_stop_file_stops_the_job_as_sigterm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stop_file = tmp_path / "stop"
    monkeypatch.setenv("FCP_STOP_FILE", str(stop_file))
    words = ["--node-rank=1", f"--log-dir={tmp_path / 'logs'}", "--", sys.executable, "-c"]
    # The command stands for a launcher with one rank, which makes the file itself and then ends its step when asked.
    rank = (
        "import signal, sys, time; from fcp_cli.util.processes import STOP;"
        "signal.signal(STOP, lambda *_: sys.exit(130)); time.sleep(600)"
    )
    launcher = (
        f"import pathlib, subprocess, sys; rank = subprocess.Popen([sys.executable, '-c', {rank!r}]);"
        f"import time; time.sleep(3); pathlib.Path({str(stop_file)!r}).touch(); sys.exit(rank.wait())"
    )
    assert node.main([*words, launcher]) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == (
        "stopping at the end of this step; press Ctrl-C again to stop at once\nerror: stopped by SIGTERM\n"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--nodes=16",
            "--sbatch-option=--nodes=16 contradicts the job, which needs --nodes 2; see --nodes",
        ),
        (
            "-N1",
            "--sbatch-option=-N1 contradicts the job, which needs -N 2; see --nodes",
        ),
        (
            "--ntasks-per-node 8",
            "--sbatch-option=--ntasks-per-node 8 contradicts the job, which needs --ntasks-per-node 1; see --nodes",
        ),
        ("--partiton=gpu", "sbatch has no option --partiton; did you mean '--partition'?"),
    ],
)
def test_an_option_of_sbatch_that_contradicts_the_job_is_refused_before_the_queue(option: str, message: str) -> None:
    made = cluster_job()
    with pytest.raises(UsageError) as error:
        option_values(ClusterOptions(sbatch_option=(option,)), TARGETS["slurm"], made, Assumptions())
    assert str(error.value) == message
    taken = ("--nodes=2", "-N 2", "--site-plugin=1", "-p gpu", "--mem-per-gpu 4G")  # a plugin of the site is no mistake
    values = option_values(ClusterOptions(sbatch_option=taken), TARGETS["slurm"], made, Assumptions())
    assert values["sbatch_options"] == list(taken)


def test_nodes_and_devices_that_the_planned_cluster_does_not_have_are_refused(tmp_path: Path) -> None:
    profile = shipped_profile("qwen3-8b").text.replace("cluster: example-8x8", "cluster: h100-8x8")
    planned = plan_metadata(num_ranks=64, cost_profile=profile)
    plan = tmp_path / "plan.parquet"
    with pytest.raises(UsageError) as error:
        place(plan, planned, UNKNOWN_MACHINE, nodes=2, must_fit=False)
    assert str(error.value) == (
        f"--nodes 2 puts 32 processes on a node, but {plan} is for h100-8x8, whose nodes have 8 devices; give --nodes 8, "
        "or plan for fewer ranks"
    )
    assert place(plan, planned, UNKNOWN_MACHINE, nodes=16, must_fit=False) == (16, 4)
    with pytest.raises(UsageError) as error:
        cluster_machine("npu", planned, lambda: CPU, Assumptions())
    assert str(error.value) == (
        "--device npu contradicts the plan, which is for h100-8x8 (--device cuda); plan for the cluster that the job runs on"
    )


class Pods:
    """Pods of a JobSet, one process after the other: each start of a node notes the command that it would run."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run_dir, self._set = run_dir, monkeypatch.setenv
        self._started: list[list[str]] = []
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        monkeypatch.setenv("FCP_RUN_DIR", str(run_dir))
        monkeypatch.setenv("FCP_PLAN", str(run_dir / "plan.parquet"))
        monkeypatch.setattr(node, "write_record", lambda *_: None)
        monkeypatch.setattr(node, "PlanReader", lambda _: SimpleNamespace(metadata=None))
        monkeypatch.setattr(node, "run_command", self._run)
        monkeypatch.setattr(owner, "_SETTLE_SECONDS", 0.0)

    def _run(self, argv: list[str], **_: object) -> JobOutcome:
        self._started.append(list(argv))
        (self._run_dir / "metrics.jsonl").touch()  # rank 0's, once all nodes have met
        return JobOutcome(status=1, stopped_by=signal.SIGTERM, failure=None)

    def resumes(self, job: str, rank: int, *command: str, name: str = "FCP_JOB") -> bool:
        """Start a node of a job; return whether its trainer is to resume."""
        self._set(name, job)
        words = [f"--node-rank={rank}", f"--log-dir={self._run_dir}", "--", *command]
        assert node.main(words) == 128 + signal.SIGTERM
        assert self._started[-1] in ([*command], [*command, "--resume"])
        return len(self._started[-1]) > len(command)


@pytest.mark.parametrize("name", ["FCP_JOB", "SLURM_JOB_ID"])
def test_a_job_that_the_cluster_starts_again_resumes_on_every_node_and_another_job_does_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods, trainer = Pods(tmp_path, monkeypatch), ("-m", "fcp_cli.training.train")
    assert not pods.resumes("7", 0, *trainer, name=name)
    assert pods.resumes("7", 1, *trainer, name=name)
    assert pods.resumes("7", 0, *trainer, name=name)
    assert not pods.resumes("7", 0, "train.py", name=name)  # it looks for its own checkpoint
    assert not pods.resumes("8", 0, *trainer, name=name)  # the trainer itself refuses the run that is there


def test_nodes_of_a_first_start_do_not_resume_whichever_starts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = Pods(tmp_path, monkeypatch)
    monkeypatch.setattr(Path, "touch", lambda *_: None)  # the nodes have not met
    assert not pods.resumes("7", 0, "-m", "fcp_cli.training.train")
    assert not pods.resumes("7", 1, "-m", "fcp_cli.training.train")


def test_the_time_to_stop_is_the_plans_longest_step_and_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SimpleNamespace(predicted_seconds=lambda: (np.arange(2), np.array([12.0, 53.0])))
    monkeypatch.setattr("fcp_cli.launching.job.PlanReader", lambda path: reader)
    made = cluster_job()  # two nodes save 8.19e9 parameters
    assert made.needed_grace_seconds == math.ceil(1.5 * 53 + 8_190_735_360 * 14 / 2e9)
    made = replace(made, grace_seconds=made.needed_grace_seconds)
    script = job_files(TARGETS["slurm"], made)["job.sbatch"]
    assert f"#SBATCH --signal=B:TERM@{made.grace_seconds + 20}\n" in script
    assert f"--grace={made.grace_seconds} " in script
    for name in ("trainjob", "jobset"):
        (text,) = job_files(TARGETS[name], made).values()
        assert f"terminationGracePeriodSeconds: {made.grace_seconds + 20}\n" in text


@pytest.mark.processes
@pytest.mark.parametrize(("restarts", "requeued"), [("", True), ("1", True), ("2", False)])
def test_a_job_stopped_at_its_time_limit_goes_back_into_the_queue_as_often_as_the_user_allows(
    tmp_path: Path, restarts: str, requeued: bool
) -> None:
    cluster = FakeCluster(tmp_path)
    cluster.add("srun", "kill -TERM $PPID; sleep 1; exit 143")  # Slurm's signal; then the ranks have saved
    cluster.add("scontrol", f'case $1 in show) echo localhost;; requeue) echo "$2" > {tmp_path}/requeued;; esac')
    made = replace(cluster_job(), target="slurm", directory=tmp_path, run_dir=tmp_path / "run")
    made = replace(made, values={**made.values, "setup": (), "max_restarts": 2})
    script = tmp_path / "job.sbatch"
    script.write_text(job_files(TARGETS["slurm"], made)[script.name])
    done = cluster.run("bash", str(script), **allocation(2), SLURM_RESTART_COUNT=restarts)
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "requeued").exists() == requeued


def test_a_name_of_node_0_that_does_not_resolve_is_one_line_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "_LOOK_UP_SECONDS", 0.0)
    monkeypatch.setattr(node, "resolution_problem", lambda name: "Name or service not known")
    monkeypatch.setattr(node, "run_command", lambda *_, **__: JobOutcome(status=0, stopped_by=None, failure=None))
    words = ["--node-rank=1", f"--log-dir={tmp_path / 'logs'}", "--master-addr=no-such-node", "--", "train"]
    unknown = f"{socket.gethostname()} cannot find node 0 by the name no-such-node (Name or service not known); "
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert node.main(words) == 1
    remedy = "let the nodes' resolver know it, or set MASTER_ADDR in the script to an address"
    assert capfd.readouterr().err == f"error: node 1: {unknown}{remedy}\n"
    monkeypatch.delenv("SLURM_JOB_ID")  # a container that has not started yet
    assert node.main(words) == 0
    assert capfd.readouterr().err == f"warning: {unknown}waiting for it\n"


def test_the_documentation_lists_every_variable_of_a_template() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "templates.md").read_text()
    table = text[text.index("| variable | value |") :].split("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    target = TARGETS["slurm"]
    job = cluster_job()
    assert listed == set(template_values(job, target.node(job), target.ready))


def test_a_port_in_use_is_one_line_before_anything_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        words = ["--node-rank=0", f"--log-dir={tmp_path / 'logs'}", f"--master-port={port}", "--", sys.executable]
        assert node.main(words) == 1
    assert capfd.readouterr().err == (
        f"error: node 0: port {port} of {socket.gethostname()} is in use by another process; choose another with "
        "--master-port\n"
    )
    assert not (tmp_path / "logs").exists()


def test_variables_have_a_value_in_the_files_or_are_read_at_the_start() -> None:
    words = ("HF_TOKEN", "A=b=c", "EMPTY=", "TOKENIZERS_PARALLELISM=false", "SSH_KEY_PATH=/k")
    given = {"A": "b=c", "EMPTY": "", "TOKENIZERS_PARALLELISM": "false", "SSH_KEY_PATH": "/k"}
    assert split_variables(words) == (given, ("HF_TOKEN",))


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"slurm"}))
def test_a_secret_is_named_in_the_files_of_a_job_and_not_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    made = replace(cluster_job(), target=name)
    request = ClusterOptions(env=("HF_TOKEN", "HF_HOME=/hub"), image="registry.example/fcp:1")
    made = for_cluster(request, made, None, Assumptions())
    files = job_files(TARGETS[name], made)
    text = "".join(files.values())
    assert "HF_TOKEN" in text
    assert "/hub" in text
    assert "hf_secret" not in text
    record = json_text(document_of(made, files))
    assert "/hub" not in record
    assert "hf_secret" not in record


@pytest.mark.processes
def test_a_job_without_its_secret_stops_at_once_and_one_with_it_gets_it(tmp_path: Path) -> None:
    (tmp_path / "token.py").write_text("import os\nprint(os.environ['HF_TOKEN'])\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nexec {sys.executable} {tmp_path / 'token.py'}\n")
    python.chmod(0o755)
    cluster = FakeCluster(tmp_path)
    made = replace(cluster_job(), target="slurm", directory=tmp_path, run_dir=tmp_path / "run", python=str(python))
    request = ClusterOptions(env=("HF_TOKEN",), python=str(python))
    script = tmp_path / "job.sbatch"
    script.write_text(job_files(TARGETS["slurm"], for_cluster(request, made, None, Assumptions()))[script.name])
    refused = cluster.run_batch_script(script)
    assert refused.returncode != 0
    assert "HF_TOKEN: is not set; export it where you run sbatch" in refused.stderr
    ran = cluster.run("bash", str(script), **allocation(2), HF_TOKEN="hf_secret")
    assert ran.stdout.count("hf_secret") == 2, ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-x=1", "--env is '-x=1'; it must be the name of a variable and a value, as HF_HOME=/shared/hub"),
        ("FCP_PLAN=x", "--env FCP_PLAN: fcp sets the variables FCP_... of its jobs by itself"),
        (
            "WANDB_API_KEY=x",
            "--env WANDB_API_KEY=... would write a secret to the job's files; give --env WANDB_API_KEY, without the "
            "value: the job reads it when it starts",
        ),
    ],
)
def test_a_variable_that_cannot_be_meant_is_one_line(words: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        split_variables((words,))
    assert str(error.value) == message
