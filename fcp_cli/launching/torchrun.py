"""torchrun's command line for a launch. Pure functions: a spec in, a list of words out, never a shell string to parse.

torchrun is started as a module of the same interpreter, so that it never is the one of another environment on PATH.
"""

from __future__ import annotations

from fcp_cli.launching.spec import LaunchSpec


def torchrun_argv(spec: LaunchSpec, *, node_rank: int | str = 0) -> list[str]:
    """The command of one node; its number may be a `shell.variable`, as may be any text of the specification.

    On one node torchrun finds a free port by itself; several nodes meet at master_addr:master_port.
    """
    argv = [spec.python, "-m", "torch.distributed.run", f"--nproc-per-node={spec.processes_per_node}"]
    if spec.num_nodes == 1:
        argv += ["--standalone"]
    else:
        argv += [
            f"--nnodes={spec.num_nodes}",
            f"--node-rank={node_rank}",
            f"--master-addr={spec.master_addr}",
            f"--master-port={spec.master_port}",
        ]
        if spec.join_timeout_seconds is not None:
            argv += [f"--rdzv-conf=timeout={spec.join_timeout_seconds}"]
    if spec.log_dir is not None:
        argv += [f"--log-dir={spec.log_dir}", "--redirects=3"]
    return [*argv, *spec.program, *spec.arguments]
