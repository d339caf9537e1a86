"""`fcp trust`: allow a config file of the current folder to set options that run commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fcp_cli.command_line.command import takes
from fcp_cli.console import note
from fcp_cli.options import Arg, Opt


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustOptions:
    """The options of `fcp trust`."""

    config: Annotated[Path, Arg("The config file.")] = Path("fcp.yaml")
    revoke: Annotated[bool, Opt("Revoke the trust.")] = False


@takes(TrustOptions, "fcp trust", "fcp trust --revoke")
def trust(options: TrustOptions) -> None:
    """Let an fcp.yaml set options that run commands or write elsewhere.

    Read it first. Trust covers the file's path and current content: after a change, fcp asks again.
    """
    from fcp_cli.command_line.trust import add_trust, digest_of, remove_trust
    from fcp_cli.errors import UsageError
    from fcp_cli.reading.documents import read_text

    if options.revoke:
        remove_trust(options.config)
        note(f"{options.config} is trusted no longer")
    else:
        add_trust(options.config, digest_of(read_text(options.config, error=UsageError, label="the config ")))
        note(f"{options.config} is trusted with its current content; after a change, fcp asks again")
