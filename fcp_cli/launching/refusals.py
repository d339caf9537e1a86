"""Checks for conditions that make a launch impossible; each raises a one-line error."""

from __future__ import annotations

import importlib.util
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.launching.job import Job
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.checkpoints import check_plan_of, check_unfinished, checkpoints, read_header, require_files
from fcp_cli.runs.run_dir import Launched, RunPaths
from fcp_cli.runs.trained_run import require_recorded
from fcp_cli.util.network import is_host
from fcp_cli.util.plugins import pip_install

# weight and two AdamW moments in float32
_CHECKPOINT_BYTES_PER_PARAMETER = 12
# exported weights (RUN/model) in float32, twice: a new export is written before the old one is removed
_EXPORT_BYTES_PER_PARAMETER = 8
_LEAST_FREE_BYTES = 64 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "127.0.1.1", "::1")


def check_trainer(metadata: PlanMetadata, plan: Path, *, needs_transformers: bool) -> None:
    """Raise RunError if the bundled trainer lacks transformers, or the plan has several devices per rank."""
    if needs_transformers and importlib.util.find_spec("transformers") is None:
        raise RunError(
            f"transformers is not installed here, and the bundled trainer needs it; run: {pip_install('hf')}"
        )
    if metadata.devices_per_rank > 1:
        raise RunError(
            f"{plan} has {metadata.devices_per_rank} devices per rank (tensor x pipeline parallel), but the bundled "
            "trainer uses one; give your own script: fcp launch ... -- SCRIPT ARGS"
        )


def check_steps(plan: Path, metadata: PlanMetadata, steps: int | None) -> None:
    """Raise RunError if more steps are requested than the plan has."""
    if steps is not None and steps > metadata.end_step:
        raise RunError(
            f"--steps is {steps}, but {plan} ends after {metadata.end_step}; plan more with --epochs, or remove --steps"
        )


def check_resumable(
    run_dir: Path,
    launched: Launched,
    metadata: PlanMetadata,
    steps: int | None,
    *,
    accepts_unrecorded: bool = False,
) -> None:
    """Raise RunError if a run cannot resume under a plan: another plan, a damaged checkpoint, or no steps left.

    Args:
        run_dir: the run directory.
        launched: its latest launch.
        metadata: metadata of the plan to continue with.
        steps: step to stop at; None: the end of the plan.
        accepts_unrecorded: whether to accept a checkpoint with steps missing in the metrics.
    """
    saved = checkpoints(RunPaths(run_dir=run_dir).checkpoints)
    if saved:
        header = read_header(saved[-1])
        check_plan_of(header, metadata, checkpoint=saved[-1])
        require_files(saved[-1], header)
    elif launched.plan_hash != metadata.plan_hash:
        raise RunError(
            f"{run_dir} was trained under the plan {launched.plan_hash[:12]}, but this one is "
            f"{metadata.plan_hash[:12]}; give the old plan with --plan, or start a new run without --resume"
        )
    elif metadata.continues is not None:
        raise RunError(
            f"the plan continues from step {metadata.first_step}, but {run_dir} has no checkpoint to continue from; "
            "start a new run with a plan of all steps"
        )
    finished = read_header(saved[-1]).step if saved else 0
    end = metadata.end_step
    check_unfinished(run_dir, run_dir, finished, last_step=steps or end, end_step=end)
    if saved:
        require_recorded(saved[-1], accepts=accepts_unrecorded)


def check_beginning(plan: Path, metadata: PlanMetadata) -> None:
    """Raise RunError if the plan of a new run continues another run."""
    if metadata.continues is not None:
        raise RunError(
            f"{plan} continues from step {metadata.first_step} of a run under the plan "
            f"{metadata.continues.plan_hash[:12]}; resume that run: fcp launch --plan {plan} --run-dir RUN --resume"
        )


def check_space(job: Job) -> None:
    """Check permissions and free space like `check_run_dir`, but in the nearest existing parent, creating nothing."""
    _check_folder(next(folder for folder in (job.run_dir, *job.run_dir.parents) if folder.exists()), job)


def check_run_dir(job: Job) -> None:
    """Create the run directory; raise FcpError if it is not writable or lacks space, and remove a new one again."""
    made = not job.run_dir.exists()
    try:
        _check_folder(job.run_dir, job)
    except FcpError:
        if made:
            with suppress(OSError):
                job.run_dir.rmdir()
        raise


def _check_folder(folder: Path, job: Job) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"fcp")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise FcpError(
            f"cannot write the run directory {folder}: {error.strerror}; choose another --run-dir"
        ) from error
    # A new checkpoint is written before the oldest is removed.
    count = job.kept_checkpoints + 1
    bytes_per_parameter = _CHECKPOINT_BYTES_PER_PARAMETER * count + _EXPORT_BYTES_PER_PARAMETER
    needed = _LEAST_FREE_BYTES + job.parameters * bytes_per_parameter
    if free < needed:
        raise FcpError(
            f"{folder} has {free / 1e9:.1f} GB free, but {count} checkpoints and the exported model need "
            f"{needed / 1e9:.1f} GB; choose another --run-dir or a smaller --keep"
        )


def check_nodes(num_nodes: int, node_rank: int | None, master_addr: str | None, run_dir: Path | None) -> None:
    """Raise UsageError if a multi-node launch lacks a valid --master-addr, --node-rank or --run-dir."""
    if num_nodes == 1:
        return
    if not master_addr:
        raise UsageError(f"--nodes {num_nodes} needs --master-addr: the address of node 0, the same on every node")
    if not is_host(master_addr):
        raise UsageError(f"--master-addr is {master_addr!r}; it must be the name or the address of node 0")
    if master_addr in _LOOPBACK:
        raise UsageError(
            f"--master-addr {master_addr} means another machine on each of {num_nodes} nodes; give node 0's address"
        )
    if node_rank is None:
        raise UsageError(
            f"--nodes {num_nodes} needs --node-rank, 0 to {num_nodes - 1}, on each node; --dry-run prints all commands"
        )
    if not 0 <= node_rank < num_nodes:
        raise UsageError(f"--node-rank is {node_rank}; with --nodes {num_nodes} it must be 0 to {num_nodes - 1}")
    if run_dir is None:
        raise UsageError(f"--nodes {num_nodes} needs --run-dir: a folder that all nodes share, the same on every node")
