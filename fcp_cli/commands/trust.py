"""`fcp trust`: allow a config file of the current folder to set options that run commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fcp_cli.command_line.command import takes
from fcp_cli.console import note
from fcp_cli.options import Arg, Opt


@takes("fcp trust", "fcp trust --revoke")
def trust(
    *,
    config: Annotated[Path, Arg("The config file.")] = Path("fcp.yaml"),
    revoke: Annotated[bool, Opt("Revoke the trust.")] = False,
) -> None:
    """Let an fcp.yaml set options that run commands or write elsewhere.

    Read it first. Trust covers the file's path and current content: after a change, fcp asks again.
    """
    from fcp_cli.command_line.trust import add_trust, digest_of, remove_trust
    from fcp_cli.errors import UsageError
    from fcp_cli.reading.documents import read_text

    if revoke:
        remove_trust(config)
        note(f"{config} is trusted no longer")
    else:
        add_trust(config, digest_of(read_text(config, error=UsageError, label="the config ")))
        note(f"{config} is trusted with its current content; after a change, fcp asks again")
