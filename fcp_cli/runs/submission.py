"""The file `job.json` of a run that a cluster's scheduler starts, for `fcp jobs`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.state_file import read_state
from fcp_cli.validation import validated

FORMAT = "fcp-job/1"


# Names as Kubernetes has them (RFC 1123).
LABEL: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
SUBDOMAIN: Final = rf"{LABEL}(\.{LABEL})*"
MOST_NAME: Final = 253
# As the commands of these values take them; none begins with a dash. Those of other targets are empty.
SlurmJobId = Annotated[
    str, Meta(pattern=r"^([1-9][0-9]{0,9}([_+][0-9]{1,9})?)?\Z", description="the number of a Slurm job, such as 4711")
]
JobName = Annotated[
    str,
    Meta(
        pattern=rf"^{SUBDOMAIN}\Z",
        max_length=MOST_NAME,
        description="a name of Kubernetes: lower-case letters, digits, dashes and dots",
    ),
]
Namespace = Annotated[
    str,
    Meta(
        pattern=rf"^({LABEL})?\Z",
        description="a namespace of Kubernetes: lower-case letters, digits and dashes",
    ),
]
TargetName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z", description="a target of fcp launch")]
SCHEDULERS: Final = ("slurm", "trainjob", "pytorchjob", "jobset", "volcano")
"""Targets whose jobs `fcp jobs` can ask for; of others the run's own files tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job of a scheduler.

    Attributes:
        target: the target, as `fcp launch --target` takes it.
        name: the name of the job, on Kubernetes of its object.
        namespace: the namespace on Kubernetes; "": the one that kubectl is set to.
        job_id: Slurm's number; "" on Kubernetes.
    """

    target: TargetName
    name: JobName
    namespace: Namespace = ""
    job_id: SlurmJobId = ""

    @property
    def has_scheduler(self) -> bool:
        """Return whether a scheduler can be asked for the job."""
        return self.target in SCHEDULERS

    def __post_init__(self) -> None:
        if (self.target == "slurm") != bool(self.job_id):
            raise ValueError(f"a job of {self.target} has job_id {self.job_id!r}")


def new_submission(*, target: str, name: str, namespace: str = "", job_id: str = "") -> Submission:
    """Return the submission of a job that a scheduler gets now."""
    given = {"target": target, "name": name, "namespace": namespace, "job_id": job_id}
    return validated(given, Submission, where="cannot note the job", error=RunError)


def write_submission(run_dir: Path, submission: Submission) -> None:
    """Write the scheduler and job of a run."""
    write_text_atomically(
        RunPaths(run_dir=run_dir).job, json.dumps({"format": FORMAT, **asdict(submission)}, indent=2) + "\n"
    )


def read_submission(run_dir: Path) -> Submission | None:
    """Read the scheduler and job of a run; None if it ran on the machine that launched it."""
    return read_state(RunPaths(run_dir=run_dir).job, Submission, format_name=FORMAT)
