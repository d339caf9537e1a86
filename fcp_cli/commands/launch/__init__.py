"""`fcp launch`: its options, the job made from them, and its start or submission."""

from fcp_cli.commands.launch.command import launch as launch
