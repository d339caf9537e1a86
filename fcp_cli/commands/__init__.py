"""One file per verb. Importing this package registers them all; none imports anything heavy at its top."""

from fcp_cli.commands import check as check
from fcp_cli.commands import compare as compare
from fcp_cli.commands import env as env
from fcp_cli.commands import inspect as inspect
from fcp_cli.commands import launch as launch
from fcp_cli.commands import manifest as manifest
from fcp_cli.commands import plan as plan
from fcp_cli.commands import profile as profile
from fcp_cli.commands import report as report
from fcp_cli.commands import trace as trace
from fcp_cli.commands import verify as verify
from fcp_cli.commands import watch as watch
