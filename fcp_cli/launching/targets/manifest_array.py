"""A build of a manifest as jobs of Slurm: an array that counts the parts, and a job after it that merges them."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fcp_cli import __version__
from fcp_cli.errors import UsageError
from fcp_cli.launching.targets.templates import render, shipped_template
from fcp_cli.launching.targets.write import submit, write_files
from fcp_cli.manifest.engines import PartFolder, array_of
from fcp_cli.manifest.sources.base import Part


def submit_build(
    folder: PartFolder, parts: Sequence[Part], build: Sequence[str], output: Path, options: Sequence[str]
) -> list[str]:
    """Write both job scripts into the folder of the parts, and submit them if Slurm is available.

    Args:
        folder: the folder of the parts.
        parts: the parts to be counted.
        build: arguments of `fcp manifest build` for the whole source, without `--shard` and `-o`.
        output: the manifest.
        options: the options of sbatch, for both jobs, as `--partition=cpu`.

    Returns:
        Lines that describe the submitted jobs, or those to be submitted.

    Raises:
        RunError: Slurm refused a job.
        FcpError: a script cannot be written.
    """
    if wrong := next((option for option in options if not option.startswith("-") or "\n" in option), None):
        raise UsageError(f"--sbatch-option {wrong!r} is not an option of sbatch; write it as --partition=cpu")
    number = "$SLURM_ARRAY_TASK_ID"
    part = shlex.quote(f"{folder.path}/part-") + f'"{number}"' + shlex.quote(f"-of-{folder.count}.parquet")
    build = [sys.executable, "-m", "fcp_cli", "manifest", "build", *build]
    count = [*map(shlex.quote, build), "--shard", f'"{number}"/{folder.count}', "-o", part]
    merge = [
        sys.executable,
        "-m",
        "fcp_cli",
        "manifest",
        "merge",
        *map(str, folder.files),
        "-o",
        str(output.absolute()),
    ]
    values = {"fcp_version": __version__, "directory": str(Path.cwd()), "sbatch_options": list(options)}
    jobs = {
        "count.sbatch": values
        | {"title": "Parts of a manifest", "job_name": "fcp-count", "array": array_of(parts), "command": count}
        | {"output": f"'{folder.path}/count-%A-%a.log'"},
        "merge.sbatch": values
        | {
            "title": "The manifest of all parts",
            "job_name": "fcp-merge",
            "array": "",
            "command": list(map(shlex.quote, merge)),
        }
        | {"output": f"'{folder.path}/merge-%j.log'"},
    }
    template = shipped_template("manifest.sbatch")
    write_files(folder.path, {name: render(template, job) for name, job in jobs.items()}, overwrite=True)
    first, second = (str(folder.path / name) for name in jobs)
    if shutil.which("sbatch") is None:
        after = f"sbatch --dependency=afterok:$(sbatch --parsable {shlex.quote(first)}) {shlex.quote(second)}"
        return ["there is no sbatch on this machine; where Slurm is:", after]
    array = submit(("sbatch", "--parsable", first)).partition(";")[0]
    merging = submit(("sbatch", "--parsable", f"--dependency=afterok:{array}", second)).partition(";")[0]
    return [f"submitted {len(parts)} parts as job {array}, and their merge as job {merging}; follow with: squeue"]
