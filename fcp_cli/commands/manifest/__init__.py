"""`fcp manifest`: options and commands to build, merge and show manifests."""

from fcp_cli.commands.manifest.command import manifest_app as manifest_app
