"""Options of a planning problem, shared by `fcp plan` and `fcp compare`; `settings.resolve` fills in defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.util.options import (
    MOST_EPOCHS,
    MOST_RANKS,
    MOST_ROWS,
    MOST_TOKENS,
    MOST_VIRTUAL_STAGES,
    Arg,
    Opt,
    OptionGroup,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Sequences, cluster and global batches to plan for; fields that are None are detected or assumed."""

    manifest: Annotated[Path | None, Arg("Lengths: Parquet, Arrow, JSON lines, CSV, numbers; - is stdin.")] = None

    profile: Annotated[
        Path | None,
        Opt("Cost profile.", group="Cluster and model", unset="profile.yaml here, else computed", common=True),
    ] = None
    model: Annotated[
        str | None,
        Opt(
            "Checkpoint's folder, shipped model or its YAML.",
            metavar="NAME|FILE",
            unset="qwen3-vl-8b",
            common=True,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        Opt(
            "Shipped cluster, or its YAML, without a profile.",
            metavar="NAME|FILE",
            unset="the accelerators here, else example-8x8",
            common=True,
        ),
    ] = None
    ranks: Annotated[int | None, Opt("Model replicas.", min=1, max=MOST_RANKS, unset="the cluster's", common=True)] = (
        None
    )
    ranks_per_node: Annotated[
        int | None, Opt("Ranks that share a node.", min=1, max=MOST_RANKS, unset="the cluster's", common=True)
    ] = None
    tokens_per_rank: Annotated[
        int | None,
        Opt(
            "Maximum tokens of a rank in a micro-batch.",
            min=1,
            max=MOST_TOKENS,
            unset="what fits",
            common=True,
        ),
    ] = None
    rank_speeds: Annotated[
        str | None,
        Opt(
            "Speeds of ranks or nodes that differ from the profile: 12=0.7,node3=0.9; one per rank; or a file.",
            metavar="RANK=SPEED,...|FILE",
            unset="all 1",
        ),
    ] = None
    sync: Annotated[
        Literal["iteration", "microbatch"] | None,
        Opt(
            "When ranks synchronize: once a step (DDP, ZeRO-1/2) or after each wave (FSDP, virtual stages).",
            unset="iteration if it fits",
            common=True,
        ),
    ] = None
    phase: Annotated[
        Literal["training", "forward"],
        Opt("Passes of micro-batches; forward: no backward, for log-probabilities."),
    ] = "training"
    device_hour_price: Annotated[float | None, Opt("Price of a device-hour, for the cost in the verdict.", min=0)] = (
        None
    )
    tensor_parallel: Annotated[
        int | None,
        Opt(
            "Devices that share each layer.",
            metavar="T",
            min=1,
            max=MOST_RANKS,
            unset="the profile's",
            common=True,
            group="Parallelism inside a rank",
        ),
    ] = None
    pipeline_parallel: Annotated[
        int | None, Opt("Stages of a pipeline.", metavar="P", min=1, max=MOST_RANKS, unset="the profile's", common=True)
    ] = None
    virtual_stages: Annotated[
        int | None,
        Opt(
            "Blocks of layers on each stage, run interleaved (Megatron's virtual pipeline).",
            metavar="V",
            min=1,
            max=MOST_VIRTUAL_STAGES,
            unset="the quickest",
        ),
    ] = None
    padded_rings: Annotated[
        bool,
        Opt("Count the padding of rings of equal chunks (Transformer Engine, MindSpeed).", group="Rings"),
    ] = False
    attention: Annotated[
        Literal["ring", "ulysses", "2d", "auto"],
        Opt("How groups split attention: by tokens, heads or both. auto: 2d if the profile prices heads."),
    ] = "ring"
    encoder_balance: Annotated[
        Literal["ring", "wave", "auto"],
        Opt(
            "Ranks that share a vision encoder's work: those of each ring, or under --sync microbatch all of a wave.",
            group="Vision encoder",
        ),
    ] = "ring"
    encoder_ranks: Annotated[
        str | None,
        Opt(
            "Number of --ranks that only encode images, ahead of the others; auto: the quickest number.",
            metavar="K|auto",
        ),
    ] = None
    recipe: Annotated[RecipeRequest, OptionGroup("Recipe")] = field(default_factory=RecipeRequest)

    global_batch_size: Annotated[
        int | None,
        Opt("Sequences per optimizer step.", min=1, max=MOST_ROWS, group="Global batches", unset="512", common=True),
    ] = None
    global_batch_tokens: Annotated[
        int | None,
        Opt(
            "Maximum tokens per step, instead.",
            common=True,
            min=1,
            max=MOST_TOKENS,
            unset="no limit",
        ),
    ] = None
    steps: int | None = None  # an option of each command, with its own default
    epochs: Annotated[int, Opt("Passes over the data.", min=1, max=MOST_EPOCHS, common=True)] = 1
    seed: Annotated[int, Opt("Seed of shuffling and solver.", min=0)] = 0
    shuffle: Annotated[bool, Opt("Shuffle every epoch.", negatable=True)] = True
    max_length: Annotated[
        int | None,
        Opt(
            "Tokens beyond which a sequence is overlong.",
            min=1,
            max=MOST_TOKENS,
            unset="what all ranks can hold",
            group="Sequences",
        ),
    ] = None
    overlong: Annotated[
        Literal["error", "drop", "truncate"], Opt("What to do with sequences that no ring can hold.")
    ] = "error"
    last_batch: Annotated[
        Literal["keep", "drop"], Opt("What to do with the last, partial batch of an epoch.", group="Global batches")
    ] = "keep"
    length_column: Annotated[
        str,
        Opt(
            "Column with lengths, or with lists of tokens; without a length, a usual name is found.", group="Sequences"
        ),
    ] = "length"

    # Options of fcp plan only.
    mix: tuple[str, ...] = ()
    solver: str = "fcp"
    max_degree: int | None = None
    max_groups: int | None = None
    max_peers: int | None = None

    @property
    def limits(self) -> dict[str, int | None]:
        """Limits on rings, as options of a solver."""
        return {name: getattr(self, name) for name in ("max_degree", "max_groups", "max_peers")}

    @property
    def manifests(self) -> list[Path]:
        """The manifest, or those of the mixture, whose words `read_mixture` validates."""
        mixed = dict.fromkeys(Path(word.rpartition(":")[0]) for word in self.mix)
        return [*([] if self.manifest is None else [self.manifest]), *mixed]

    @property
    def files(self) -> list[Path]:
        """Files that the options name, which a plan must not overwrite."""
        return [*self.manifests, *([] if self.profile is None else [self.profile])]

    def require_inputs(self) -> None:
        """Raise FcpError if the manifest, model or cluster is misspelt, before the slow import of the planner."""
        if self.manifest is not None and str(self.manifest) != "-":
            from fcp_cli.manifest.table import manifest_files

            manifest_files(self.manifest)
        if self.model is not None:
            from fcp_cli.models.model import load_model

            load_model(self.model)
        if self.cluster is not None:
            from fcp_cli.models.cluster import load_cluster

            load_cluster(self.cluster)
