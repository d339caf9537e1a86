"""What `fcp launch` starts on a machine itself: the same for `--dry-run`, the record and the run."""

from __future__ import annotations

from dataclasses import replace

from fcp_cli.launching.resolve import Launch
from fcp_cli.launching.spec import LaunchSpec


def local_spec(launch: Launch, node_rank: int) -> LaunchSpec:
    """The specification of one node's command.

    The ranks print into the first `logs/start-NNN` that is not there yet, `-nodeK` behind it on several nodes. The
    bundled trainer shows no progress of its own: fcp does, from the metrics.
    """
    spec = launch.spec
    node = "" if spec.num_nodes == 1 else f"-node{node_rank}"
    number = 1
    while (log_dir := spec.paths.logs / f"start-{number:03d}{node}").exists():
        number += 1
    quiet = () if launch.settings is None else ("--quiet",)
    return replace(spec, log_dir=log_dir, arguments=(*spec.arguments, *quiet))
