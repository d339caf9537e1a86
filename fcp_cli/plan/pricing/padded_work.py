"""Work of padded sequences; separate from `padding.py`, so that ranks read plans without the cost model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fcp_cli.cost.model import WindowWork, Work, reach_tokens, token_in_window_seconds
from fcp_cli.cost.profile import CostProfile
from fcp_cli.plan.pricing.padding import padded_tokens


def padded_work(work: Work, degree: npt.ArrayLike, multiple: int | None, profile: CostProfile) -> Work:
    """Return the work of sequences padded for groups of `degree` ranks, not yet divided by the degree.

    Args:
        work: work of the sequences, unpadded or padded for one rank.
        degree: degree of each sequence's group; broadcasts.
        multiple: padding multiple, or None for no padding.
        profile: cost profile, for the linear and window seconds of padding tokens.
    """
    if multiple is None:
        return work
    tokens = padded_tokens(work.tokens, degree, multiple)
    # Kernels compute padding, too: attention scales with the square of the length, window attention linearly.
    growth = tokens / work.tokens
    added = profile.coefficients.linear_seconds_per_token * (tokens - work.tokens)
    windows = work.windows
    if windows is not None:
        windows = WindowWork(
            seconds=windows.seconds + token_in_window_seconds(profile.coefficients) * (tokens - work.tokens),
            halo_tokens=np.minimum(tokens, 2 * reach_tokens(profile.coefficients)),
            shortest_tokens=tokens,
        )
    return Work(
        attention_seconds=work.attention_seconds * growth * growth,
        linear_seconds=work.linear_seconds + added,
        tokens=tokens,
        windows=windows,
    )
