"""One node's command and environment, whichever launcher starts its ranks. Pure."""

from __future__ import annotations

from fcp_cli.launching import shell
from fcp_cli.launching.msrun import msrun_argv, path_of_python
from fcp_cli.launching.spec import LaunchSpec
from fcp_cli.launching.torchrun import torchrun_argv


def node_argv(spec: LaunchSpec, *, node_rank: int | str = 0) -> list[str]:
    """The command of one node; its number may be a `shell.variable`."""
    argv = msrun_argv if spec.launcher == "msrun" else torchrun_argv
    return argv(spec, node_rank=node_rank)


def node_environment(spec: LaunchSpec, *, inherited_path: str | None = None) -> dict[str, str]:
    """What is set for it.

    Args:
        spec: what is launched.
        inherited_path: PATH where the command runs, for msrun, which finds its interpreter there; None where
            `launching.node` sees to that.
    """
    environment = spec.job_environment()
    if spec.launcher == "msrun":
        environment["LOCAL_WORLD_SIZE"] = str(spec.processes_per_node)  # torchrun tells its ranks, msrun does not
        if inherited_path is not None:
            environment["PATH"] = path_of_python(spec.python, inherited_path)
    return environment


def shell_command(spec: LaunchSpec, *, node_rank: int = 0) -> str:
    """The command of one node with its environment, quoted: what a person can paste into a POSIX shell."""
    environment = node_environment(spec, inherited_path=shell.variable("PATH"))
    settings = [f"{name}={value}" for name, value in environment.items()]
    return shell.join(["env", *settings, *node_argv(spec, node_rank=node_rank)])
