"""What a run was handed to: the file `job.json` of a run that a cluster's scheduler starts, for `fcp jobs`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.reading.documents import read_object
from fcp_cli.runs.folder import RunPaths

FORMAT = "fcp-job/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job of a scheduler.

    Attributes:
        target: as `fcp launch --target` takes it.
        name: of the job, on Kubernetes of its object.
        namespace: on Kubernetes; "": the one that kubectl is set to.
        job_id: Slurm's number; "" on Kubernetes.
    """

    target: str
    name: str
    namespace: str = ""
    job_id: str = ""


def write_submission(run_dir: Path, submission: Submission) -> None:
    """Write what a run was handed to.

    Raises:
        FcpError: the run directory cannot be written.
    """
    write_text_atomically(
        RunPaths(run_dir=run_dir).job, json.dumps({"format": FORMAT, **asdict(submission)}, indent=2) + "\n"
    )


def read_submission(run_dir: Path) -> Submission | None:
    """Read what a run was handed to; None where it ran on the machine that launched it."""
    try:
        document = read_object(RunPaths(run_dir=run_dir).job, error=RunError)
        return Submission(**document) if document.pop("format") == FORMAT else None
    except (RunError, KeyError, TypeError):
        return None
