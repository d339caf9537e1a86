"""What `fcp plan` and `fcp compare` share: options of what to plan for; `planning/settings.py` fills in the rest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fcp_cli.console import note

if TYPE_CHECKING:
    from fcp_cli.plan.metadata import Sync

BATCHES = "Global batches"
CLUSTER = "Cluster"

Manifest = Annotated[
    Path, typer.Argument(metavar="MANIFEST", help="Parquet with lengths; - reads JSON lines from stdin.")
]
Profile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", rich_help_panel=CLUSTER, help="Cost profile (./profile.yaml, else a shipped one)."),
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=CLUSTER, help="Model replicas (the profile's cluster)."),
]
RanksPerNode = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=CLUSTER, help="Ranks that share a node (the profile's cluster)."),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(min=1, metavar="T", rich_help_panel=CLUSTER, help="Devices a layer is cut over (the profile's)."),
]
PipelineParallel = Annotated[
    int | None, typer.Option(min=1, metavar="P", rich_help_panel=CLUSTER, help="Stages of a pipeline (the profile's).")
]
TokensPerRank = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=CLUSTER,
        help="Most tokens of a rank in a micro-batch (the profile's memory).",
    ),
]
PaddedRings = Annotated[
    bool,
    typer.Option(
        rich_help_panel=CLUSTER,
        help="Count the padding of rings of equal chunks (Transformer Engine, MindSpeed).",
    ),
]
Headroom = Annotated[
    float, typer.Option(metavar="X", rich_help_panel=CLUSTER, help="Fraction of the token budget to leave free.")
]
GlobalBatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", rich_help_panel=BATCHES, help="Sequences per optimizer step (512).")
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", rich_help_panel=BATCHES, help="Of shuffling and solver.")]
Shuffle = Annotated[bool, typer.Option(rich_help_panel=BATCHES, help="Shuffle every epoch.")]
MaxLength = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=BATCHES, help="Tokens beyond which a sequence is overlong."),
]
Overlong = Annotated[
    Literal["error", "drop", "truncate"],
    typer.Option(rich_help_panel=BATCHES, metavar="POLICY", help="Of overlong sequences: error, drop or truncate."),
]
LastBatch = Annotated[
    Literal["keep", "drop"], typer.Option(rich_help_panel=BATCHES, help="An epoch's last, partial batch.")
]
LengthColumn = Annotated[
    str, typer.Option(metavar="NAME", rich_help_panel=BATCHES, help="Column with lengths, or with lists of tokens.")
]


def note_compilation(solvers: Iterable[str], syncs: Iterable[Sync]) -> None:
    """Say that the first step will take long, where our planner was never compiled on this machine."""
    if "fcp" not in solvers:
        return
    from fcp_cli.planning.fcp.solver import is_compiled

    if not all(map(is_compiled, syncs)):
        note("compiling the planner: half a minute, once on this machine")
