"""torchrun's command line for a launch. Pure functions: a spec in, a list of words out, never a shell string to parse.

torchrun is started as a module of the same interpreter, so that it never is the one of another environment on PATH.
"""

from __future__ import annotations

import shlex

from fcp_cli.launching.spec import LaunchSpec


def torchrun_argv(spec: LaunchSpec, *, node_rank: int = 0) -> list[str]:
    """The command of one node.

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
    if spec.log_dir is not None:
        argv += [f"--log-dir={spec.log_dir}", "--redirects=3"]
    return [*argv, *spec.program, *spec.arguments]


def shell_command(spec: LaunchSpec, *, node_rank: int = 0) -> str:
    """The command of one node with its environment, quoted: what a person can paste into a POSIX shell."""
    settings = [f"{name}={value}" for name, value in spec.job_environment().items()]
    return shlex.join(["env", *settings, *torchrun_argv(spec, node_rank=node_rank)])
