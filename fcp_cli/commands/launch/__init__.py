"""`fcp launch`: resolves options to a job, and starts or submits it."""

from fcp_cli.commands.launch.command import launch as launch
