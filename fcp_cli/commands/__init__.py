"""One file per verb. Importing this package registers them all; none imports anything heavy at its top."""

from fcp_cli.commands import manifest as manifest
