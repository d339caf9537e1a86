"""Sliding windows by halos against windows on the ring: `python -m benchmarks.windows`.

One sequence of a model with windows in most layers, alone on d ranks. Rows: keys and values that the busiest member
gets in a layer with a window, by its halo and on a ring, counted from the runtime's own layout. Bytes: of all layers
together, those with full attention on the ring either way. Seconds: what the analytic profile predicts when rings carry
all layers, which is how plans are priced today, over the same with the halo's bytes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Final

import numpy as np

from fcp_cli.cost.model import attention_seconds, group_seconds
from fcp_cli.cost.profile import CostProfile
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.profiling.analytic import analytic_profile
from fcp_cli.recipe import Recipe
from fcp_cli.runtime.halo import halo_of
from fcp_cli.runtime.layout import shard_layout

MODELS: Final = "gemma3-27b", "gpt-oss-20b"
CLUSTER, PER_NODE = "h100-8x8", 8
LENGTHS, DEGREES = (8_192, 32_768, 131_072), (2, 8, 16)


def halo_rows(length: int, degree: int, window: int) -> int:
    """Return the rows that the busiest member of a ring gets where tokens attend to a window."""
    layout = shard_layout((length,), degree)
    return max(halo_of(layout, index, window - 1).received for index in range(degree))


def ring_rows(length: int, degree: int) -> int:
    """Return the rows that it gets where keys and values of all members pass by."""
    layout = shard_layout((length,), degree)
    return layout.total_tokens - min(layout.tokens(index) for index in range(degree))


def seconds(profile: CostProfile, length: int, degree: int) -> float:
    """Predict one sequence on one group, which crosses nodes where it is wider than one."""
    return float(
        group_seconds(
            profile,
            attention_seconds=attention_seconds(profile.coefficients, np.array(float(length))),
            linear_seconds=profile.coefficients.linear_seconds_per_token * length,
            tokens=length,
            degree=degree,
            crosses_nodes=degree > PER_NODE,
        )
    )


def with_bytes(profile: CostProfile, share: float) -> CostProfile:
    """Return the profile of rings that carry a share of the bytes."""
    c = profile.coefficients
    fewer = replace(
        c,
        ring_bytes_per_token=c.ring_bytes_per_token * share,
        last_hop_bytes_per_token=c.last_hop_bytes_per_token * share,
    )
    return replace(profile, coefficients=fewer)


def main() -> None:
    """Print the table."""
    print(
        "| model | window | tokens | ranks | rows, halo | rows, ring | bytes of all layers | ring / halo, predicted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, length, degree in product(MODELS, LENGTHS, DEGREES):
        spec = load_model(name)
        window, kinds = spec.window_tokens, [kind.attention for kind in spec.layer_kinds]
        assert window is not None, f"{name} has no windows"
        recipe = Recipe(zero_stage=3, precision="bf16", recompute="full")
        profile = analytic_profile(spec, load_cluster(CLUSTER), recipe=recipe, sync="microbatch", ranks=64)
        halo, ring = halo_rows(length, degree, window), ring_rows(length, degree)
        in_windows = kinds.count("window") / len(kinds)
        share = 1 - in_windows + in_windows * halo / ring
        gain = seconds(profile, length, degree) / seconds(with_bytes(profile, share), length, degree)
        print(
            f"| {name} | {window:,} | {length:,} | {degree} | {halo:,} | {ring:,} | {share:.1%} | {gain:.2f}x |",
            flush=True,
        )


if __name__ == "__main__":
    main()
