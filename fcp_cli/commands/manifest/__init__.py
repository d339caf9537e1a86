"""`fcp manifest`: its options, and the commands that build, merge, show and imitate manifests."""

from fcp_cli.commands.manifest.command import manifest_app as manifest_app
