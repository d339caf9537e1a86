"""Options for measuring or computing a cost profile; `choices` fills in those not given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fcp_cli.cost.recipe import KernelChoice, RecipeRequest
from fcp_cli.util.options import MOST_RANKS, Opt, OptionGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    """Options of `fcp profile`; None and () are filled in by `choices`."""

    model: Annotated[
        str | None,
        Opt(
            "Shipped model, its YAML, or a config.json.",
            flags=("--model", "-m"),
            metavar="NAME|FILE",
            unset="qwen3-tiny on a CPU, else qwen3-vl-8b",
            common=True,
            group="Model and cluster",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        Opt(
            "Shipped cluster, or its YAML.",
            metavar="NAME|FILE",
            unset="this-machine; with --analytic example-8x8",
            common=True,
        ),
    ] = None
    recipe: Annotated[RecipeRequest, OptionGroup("Recipe")] = field(default_factory=RecipeRequest)

    budget_minutes: Annotated[
        float | None,
        Opt(
            "How long to measure.",
            metavar="MINUTES",
            min=0.01,
            group="Measuring",
            common=True,
            unset="1 for small models on a CPU, else 10",
        ),
    ] = None
    max_length: Annotated[
        int | None, Opt("Tokens of the longest pack.", unset="4096 on a CPU, else 131072", common=True)
    ] = None
    ranks: Annotated[
        int | None,
        Opt(
            "Processes to measure with (1 emulates rings); with --analytic, ranks of the job.",
            min=1,
            unset="one per device or core, 8 on each of several nodes",
            common=True,
        ),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda", "npu"], Opt("Device to measure.", common=True)] = "auto"
    nodes: Annotated[int, Opt("Number of nodes; with several, print the command for each.", min=1, max=MOST_RANKS)] = 1

    analytic: Annotated[
        bool, Opt("Compute from the figures of model and cluster.", group="Without measuring", common=True)
    ] = False
    from_samples: Annotated[Path | None, Opt("Fit these samples of a measurement.", metavar="FILE")] = None
    attention_kernel: Annotated[KernelChoice, Opt("Attention kernel to price; auto: the cluster's first.")] = "auto"
    tensor_parallel: Annotated[
        int, Opt("Devices that share each layer.", metavar="T", min=1, max=MOST_RANKS, common=True)
    ] = 1
    pipeline_parallel: Annotated[int, Opt("Stages of a pipeline.", metavar="P", min=1, max=MOST_RANKS, common=True)] = 1
    expert_parallel: Annotated[
        int, Opt("Ranks that divide the experts of a layer.", metavar="E", min=1, max=MOST_RANKS)
    ] = 1
