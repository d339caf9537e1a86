"""The errors that fcp raises deliberately.

FcpError                     exit status 1: the input, the plan or the run is at fault
├── ManifestError            a length manifest, or its source data
├── ProfileError             a cost profile, a model or a cluster description
├── PlanError                a plan file: damaged, foreign, or against its own rules
│   └── OverlongError        sequences that no group of ranks can hold
├── MaskError                an invalid mask
├── PluginError              a third-party solver, target or integration
├── RunError                 a training job that cannot follow its plan
├── UsageError               exit status 2: the command line is at fault
└── Interrupted              exit status 130: Ctrl-C; 128 + N for a job that signal N stopped

Messages are one line: what failed, the value, where, and a command or flag that helps. Documentation pages are named by
their source path, or by URL if FCP_DOCS_URL is set.
"""

import os
import re

_PAGE = re.compile(r"\bdocs/([a-z/-]+)\.md\b")


class FcpError(Exception):
    """The input is at fault; the message is for the user, without a traceback."""

    exit_status = 1

    def __str__(self) -> str:
        message, site = super().__str__(), os.environ.get("FCP_DOCS_URL", "").rstrip("/")
        return _PAGE.sub(lambda page: f"{site}/{page[1]}.html", message) if site else message


class ManifestError(FcpError):
    """A length manifest or its source data cannot be used."""


class ProfileError(FcpError):
    """A cost profile, a model or a cluster description cannot be used."""


class PlanError(FcpError):
    """A plan file is damaged, foreign, or breaks its own rules."""


class OverlongError(PlanError):
    """Sequences that no group of ranks can hold."""


class MaskError(FcpError):
    """An invalid mask."""


class PluginError(FcpError):
    """A third-party solver, launch target or integration cannot be used."""


class RunError(FcpError):
    """A training job cannot follow its plan."""


class UsageError(FcpError):
    """The command line is at fault."""

    exit_status = 2


class Interrupted(FcpError):
    """The user pressed Ctrl-C; the message names the kept files and how to continue."""

    exit_status = 130


def refuse_missing_thread(failure: BaseException) -> None:
    """Raise FcpError if an error of a library means that no thread could be started, which is no fault of the input."""
    if any(words in str(failure) for words in ("can't start new thread", "Resource temporarily unavailable")):
        raise FcpError(
            "cannot start a thread: this user or container has as many processes as its limit allows (ulimit -u, "
            "pids.max); end some, or raise the limit"
        ) from failure
