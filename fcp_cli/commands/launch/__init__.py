"""`fcp launch`: its options, the way from them to what is launched, and what is then shown, run or submitted."""

from fcp_cli.commands.launch.command import launch as launch
