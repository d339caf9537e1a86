"""Names accepted by options (models, clusters, solvers, ...), for `fcp list` and shell completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from fcp_cli.plugins import Registry

Known = Literal["models", "clusters", "solvers", "targets", "integrations"]
KINDS: Final[tuple[Known, ...]] = get_args(Known)
OF_OPTION: Final[dict[str, Known]] = {
    "model": "models",
    "cluster": "clusters",
    "solver": "solvers",
    "solvers": "solvers",
    "target": "targets",
}
"""Name of an option's field -> its values; options of few choices list them themselves."""


def known_names(kind: Known) -> list[str]:
    """Return the names of one kind, as accepted by options."""
    if kind in ("solvers", "targets", "integrations"):
        return _registry(kind).names()
    from fcp_cli.models.descriptions import shipped_names

    return shipped_names("model" if kind == "models" else "cluster")


def packages_of(kind: Known) -> dict[str, str]:
    """Return name -> package for names that third-party packages add; {} for models and clusters."""
    return _registry(kind).packages() if kind in ("solvers", "targets", "integrations") else {}


def ignored_plugins(kind: Known) -> list[str]:
    """Return a line for each third-party entry point of this kind that is ignored."""
    return _registry(kind).ignored() if kind in ("solvers", "targets", "integrations") else []


def _registry(kind: Known) -> Registry:
    if kind == "solvers":
        from fcp_cli.planning.solvers import REGISTRY as SOLVERS

        return SOLVERS
    if kind == "targets":
        from fcp_cli.launching.targets.catalog import REGISTRY as TARGETS

        return TARGETS
    from fcp_cli.runtime.injection.integrations import REGISTRY as INTEGRATIONS

    return INTEGRATIONS


def other_names(kind: Known) -> dict[str, list[str]]:
    """Return name -> aliases for models and clusters; {} for other kinds."""
    if kind not in ("models", "clusters"):
        return {}
    from fcp_cli.models.descriptions import shipped_aliases

    return shipped_aliases("model" if kind == "models" else "cluster")
