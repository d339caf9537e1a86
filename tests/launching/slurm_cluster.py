"""A real Slurm in a folder: munge, a controller, and two nodes that are both this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fcp_cli.util.processes import children, descendants, environment_of
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.ports import unused_port

NODES = ("n0", "n1")
_START_SECONDS = 30.0
_CONFIG = """
ClusterName=fcp
SlurmctldHost=localhost
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/builtin
MpiDefault=none
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=25
ReturnToService=2
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{node_ports}] CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=n[0-1] Default=YES MaxTime=60 State=UP
"""
_CGROUP_CONFIG = """
CgroupPlugin={plugin}
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
"""


class CannotStart(Exception):
    """Slurm is not installed here, or one of its daemons did not start; says why."""


class SlurmCluster:
    """A cluster that runs; its commands take it from `environment`.

    Args:
        folder: for everything; in a short path, since it holds a socket.
        proctrack: Slurm's plugin that knows a step's processes: `linuxproc` or `cgroup`.

    Attributes:
        variables: what the commands of Slurm, and jobs, have in their environment.
    """

    def __init__(self, folder: Path, proctrack: str) -> None:
        self.folder, self.proctrack = folder, proctrack
        # Ranks as torchrun starts them for users: those of other tests are forked by a process in between.
        paths = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if "forked_ranks" not in path]
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": os.pathsep.join(paths)}
        self.environment = {**os.environ, **self.variables}

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle.

        Raises:
            CannotStart: something is missing, or a daemon ended.
        """
        if os.geteuid() != 0:
            raise CannotStart("Slurm's daemons must be started by root")
        missing = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name) is None]
        if missing:
            raise CannotStart(f"{missing[0]} is not installed; make test-slurm installs it")
        self._configure()
        munge = {name: self.folder / f"munge.{name}" for name in ("socket", "key", "seed", "pid")}
        munge["key"].write_bytes(os.urandom(1024))
        munge["key"].chmod(0o400)
        files = [f"--{option}={munge[name]}" for option, name in
                 (("socket", "socket"), ("key-file", "key"), ("seed-file", "seed"), ("pid-file", "pid"))]  # fmt: skip
        self._daemon("munged", "--force", *files, f"--log-file={self.folder}/log/munged.log")
        self._daemon("slurmctld")
        for node in NODES:
            self.start_node(node)
        end = time.monotonic() + _START_SECONDS
        while self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split() != ["idle"] * len(NODES):
            if time.monotonic() > end:
                raise CannotStart(
                    f"the nodes of Slurm are not idle: {self._log('slurmd-n0') or self._log('slurmctld')}"
                )
            time.sleep(0.5)

    def start_node(self, node: str) -> None:
        """Start a node's daemon, at first or after `kill_node`."""
        self._daemon("slurmd", "-N", node)

    def stop(self) -> None:
        """Cancel what runs, end all daemons, and remove what they leave in the system."""
        self.run("scancel", "--user=root")
        with suppress(AssertionError):
            wait_until(lambda: not self.run("squeue", "--noheader").stdout.strip(), every_seconds=0.5)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munge"):
            with suppress(OSError, ValueError):
                pid = int((self.folder / f"{name}.pid").read_text())
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda pid=pid: not _runs(pid))  # type: ignore[misc]
        for group in Path("/sys/fs/cgroup").glob("*/slurm_n[01]"):
            for path in (*sorted(group.glob("**/"), reverse=True), group):
                with suppress(OSError):
                    path.rmdir()

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands to its end."""
        return subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )

    def state(self, job: int) -> str:
        """Return a job's state, as `scontrol show job` has it."""
        shown = self.run("scontrol", "show", "job", str(job)).stdout
        return shown.partition("JobState=")[2].split(maxsplit=1)[0]

    def wait_for(self, job: int, *states: str) -> str:
        """Wait until a job is in one of these states; return which."""
        wait_until(lambda: self.state(job) in states, every_seconds=0.5)
        return self.state(job)

    def kill_node(self, node: str) -> None:
        """End a node as a loss of power does: its daemon and all processes of its steps, at once."""
        pids = [int((self.folder / f"slurmd-{node}.pid").read_text())]
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (path / "cmdline").read_bytes().startswith(b"slurmstepd: ["):
                    step = int(path.name)
                    if any(environment_of(pid).get("SLURMD_NODENAME") == node for pid in children(step)):
                        pids += [step, *descendants(step)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _configure(self) -> None:
        for name in ("state", "log", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        ports = unused_port(count=3)
        text = _CONFIG.format(
            folder=self.folder,
            proctrack=self.proctrack,
            controller_port=ports,
            node_ports=f"{ports + 1}-{ports + 2}",
        )
        (self.folder / "slurm.conf").write_text(text)
        plugin = "cgroup/v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(_CGROUP_CONFIG.format(plugin=plugin))

    def _daemon(self, *argv: str) -> None:
        """Start a program that goes into the background by itself."""
        # Files, not pipes: the daemon keeps them, and nobody would see a pipe's end.
        output = self.folder / "log" / f"{argv[0]}.start"
        with output.open("wb") as stream:
            started = subprocess.run(
                argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                timeout=60,
                check=False,
            )
        if started.returncode:
            raise CannotStart(f"{argv[0]} did not start: {output.read_text().strip() or self._log(argv[0])}")

    def _log(self, name: str) -> str:
        path = self.folder / "log" / f"{name}.log"
        errors = [line for line in path.read_text().splitlines() if "error" in line] if path.exists() else []
        return errors[-1] if errors else ""


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@contextmanager
def running(folder: Path, proctrack: str, on_failure: Callable[[str], None]) -> Iterator[SlurmCluster]:
    """Yield a cluster that is ended whatever happens; `on_failure` is told why there is none."""
    cluster = SlurmCluster(folder, proctrack)
    try:
        try:
            cluster.start()
        except CannotStart as error:
            on_failure(str(error))
        yield cluster
    finally:
        cluster.stop()
