"""Options of a planning problem, as `fcp plan` and `fcp compare` take them (`settings.resolve` completes them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fcp_cli.kernel_names import KernelChoice
from fcp_cli.options import MOST_EPOCHS, MOST_RANKS, MOST_ROWS, MOST_TOKENS, Arg, Group, Opt
from fcp_cli.recipe import RecipeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The sequences, the cluster and the global batches to plan for; None is found out or assumed."""

    manifest: Annotated[Path | None, Arg("Lengths: Parquet, Arrow, JSON lines, CSV or numbers; - reads stdin.")] = None

    profile: Annotated[
        Path | None,
        Opt("Cost profile.", group="Cluster", unset="profile.yaml here, else computed"),
    ] = None
    model: Annotated[
        str | None,
        Opt(
            "Shipped model, or its YAML: what is planned for without a profile.",
            metavar="NAME|FILE",
            unset="qwen3-vl-8b",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        Opt(
            "Shipped cluster, or its YAML, to plan for without a profile.",
            metavar="NAME|FILE",
            unset="the accelerators here, else example-8x8",
        ),
    ] = None
    attention_kernel: Annotated[
        KernelChoice, Opt("Attention kernel to price without a profile; auto: the cluster's first.")
    ] = "auto"
    ranks: Annotated[int | None, Opt("Model replicas.", min=1, max=MOST_RANKS, unset="the cluster's")] = None
    ranks_per_node: Annotated[
        int | None, Opt("Ranks that share a node.", min=1, max=MOST_RANKS, unset="the cluster's")
    ] = None
    tokens_per_rank: Annotated[
        int | None,
        Opt("Most tokens of a rank in a micro-batch.", min=1, max=MOST_TOKENS, unset="what the recipe leaves room for"),
    ] = None
    rank_speeds: Annotated[
        str | None,
        Opt(
            "Speeds of ranks or nodes that are not as the profile says: 12=0.7,node3=0.9; or one per rank; or a file.",
            metavar="RANK=SPEED,...|FILE",
            unset="all 1",
        ),
    ] = None
    sync: Annotated[
        Literal["iteration", "microbatch"] | None,
        Opt(
            "Where ranks wait: at the end of a step (DDP, ZeRO-1/2), or after each wave (FSDP, virtual stages).",
            unset="iteration where that fits",
        ),
    ] = None
    phase: Annotated[
        Literal["training", "forward"],
        Opt("What micro-batches run: forward is a pass for log-probabilities, without a backward."),
    ] = "training"
    headroom: Annotated[float, Opt("Fraction of the token budget to leave free.", min=0, below=1)] = 0.0
    device_hour_price: Annotated[
        float | None, Opt("Price of a device for an hour, for the money that the verdict names.", min=0)
    ] = None
    tensor_parallel: Annotated[
        int | None, Opt("Devices that share each layer.", metavar="T", min=1, max=MOST_RANKS, unset="the profile's")
    ] = None
    pipeline_parallel: Annotated[
        int | None, Opt("Stages of a pipeline.", metavar="P", min=1, max=MOST_RANKS, unset="the profile's")
    ] = None
    virtual_stages: Annotated[
        int,
        Opt(
            "Blocks of layers on each stage, run interleaved (Megatron's virtual pipeline).",
            metavar="V",
            min=1,
            max=MOST_RANKS,
        ),
    ] = 1
    padded_rings: Annotated[
        bool, Opt("Count the padding of rings of equal chunks (Transformer Engine, MindSpeed).", negatable=True)
    ] = False
    attention: Annotated[
        Literal["ring", "ulysses", "2d", "auto"],
        Opt(
            "How groups split attention: by tokens, by heads, by what takes least, or so where the profile knows heads."
        ),
    ] = "ring"
    encoder_balance: Annotated[
        Literal["ring", "wave", "auto"],
        Opt("Who shares a vision encoder's work: each ring's ranks, or under --sync microbatch all of a wave's."),
    ] = "ring"
    encoder_ranks: Annotated[
        str | None,
        Opt("Of --ranks, so many only encode pictures, ahead of the others; auto: as many as pay.", metavar="K|auto"),
    ] = None
    embeddings_cached: Annotated[
        bool, Opt("Count a frozen vision encoder in the first epoch only: fcp launch --cache-embeddings DIR.")
    ] = False
    recipe: Annotated[RecipeRequest, Group("Recipe that memory and times are of")] = field(
        default_factory=RecipeRequest
    )

    global_batch_size: Annotated[
        int | None, Opt("Sequences per optimizer step.", min=1, max=MOST_ROWS, group="Global batches", unset="512")
    ] = None
    global_batch_tokens: Annotated[
        int | None,
        Opt(
            "Most tokens per optimizer step, in place of a number of sequences.",
            min=1,
            max=MOST_TOKENS,
            unset="no limit",
        ),
    ] = None
    step_column: Annotated[
        str | None,
        Opt(
            "Column of a trace, as of rollouts, that says which step each row was in: batches as they were.",
            unset="none",
        ),
    ] = None
    steps: Annotated[int | None, Opt("Plan only the first N steps.", min=1, unset="all")] = None
    epochs: Annotated[int, Opt("Passes over the data.", min=1, max=MOST_EPOCHS)] = 1
    seed: Annotated[int, Opt("Seed of shuffling and solver.", min=0)] = 0
    shuffle: Annotated[bool, Opt("Shuffle every epoch.", negatable=True)] = True
    max_length: Annotated[
        int | None,
        Opt("Tokens beyond which a sequence is overlong.", min=1, max=MOST_TOKENS, unset="what all ranks can hold"),
    ] = None
    overlong: Annotated[Literal["error", "drop", "truncate"], Opt("What to do about overlong sequences.")] = "error"
    last_batch: Annotated[Literal["keep", "drop"], Opt("What to do about an epoch's last, partial batch.")] = "keep"
    length_column: Annotated[
        str, Opt("Column with lengths, or with lists of tokens; without a length, a usual name is found.")
    ] = "length"
