"""Every error that fcp raises on purpose.

FcpError                     exit status 1: the input, the plan or the run is at fault
├── ManifestError            a length manifest, or the data it is built from
├── ProfileError             a cost profile, a model or a cluster description
├── PlanError                a plan file: damaged, foreign, or against its own rules
│   └── OverlongError        sequences that no group of ranks can hold
├── MaskError                a mask that no sequence can have
├── PluginError              a solver, target or integration of another installed package
├── RunError                 a training job that cannot follow its plan
├── UsageError               exit status 2: the command line is at fault
└── Interrupted              exit status 130: Ctrl-C; 128 + N for a job that signal N stopped

Each carries one line: the fault, the value, the place, and the command or flag that helps. Pages of the documentation
are named as they lie in the sources, or where the site is that FCP_DOCS_URL names.
"""

import os
import re

_PAGE = re.compile(r"\bdocs/([a-z/-]+)\.md\b")


class FcpError(Exception):
    """The input is at fault; the message is for the user and no traceback is shown."""

    exit_status = 1

    def __str__(self) -> str:
        message, site = super().__str__(), os.environ.get("FCP_DOCS_URL", "").rstrip("/")
        return _PAGE.sub(lambda page: f"{site}/{page[1]}.html", message) if site else message


class ManifestError(FcpError):
    """A length manifest, or the data it is built from, cannot be used."""


class ProfileError(FcpError):
    """A cost profile, a model or a cluster description cannot be used."""


class PlanError(FcpError):
    """A plan file is damaged, foreign, or breaks its own rules."""


class OverlongError(PlanError):
    """Sequences that no group of ranks can hold."""


class MaskError(FcpError):
    """A mask that no sequence can have."""


class PluginError(FcpError):
    """A solver, a launch target or an integration of another installed package cannot be used."""


class RunError(FcpError):
    """A training job cannot follow its plan."""


class UsageError(FcpError):
    """The command line is at fault."""

    exit_status = 2


class Interrupted(FcpError):
    """The user pressed Ctrl-C; the message names the kept files and how to continue."""

    exit_status = 130
