"""What the FCP and DHP papers say of themselves: speed-ups over their best static baseline, measured on Ascend NPUs.

The bars of their figures cannot be read; these are the numbers of their running text.

FCP: "Efficient Scaling of LLM Training with Flexible Context Parallelism", arXiv:2602.21788v2, 4 x 16 Ascend 910C.
DHP: "DHP: Efficient Scaling of MLLM Training with Dynamic Hybrid Parallelism", its first version, 8 x 8 Ascend 910B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Encoder = Literal["text", "trained", "frozen"]  # text: no encoder

FCP_CLUSTER = "ascend910c-4x16"
DHP_CLUSTER = "ascend910b-8x8"
PAPER_OF = {FCP_CLUSTER: "FCP", DHP_CLUSTER: "DHP"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A paper's figure of end-to-end speed-ups: the range over its 18 bars, and the bars that the text names.

    Attributes:
        above_1_2: bars of more than 1.2x.
        bars: (model, data set) to speed-up.
    """

    lowest: float
    highest: float
    above_1_2: int | None
    where: str
    bars: dict[tuple[str, str], float]


CLAIMS: dict[tuple[str, Encoder], Claim] = {
    (FCP_CLUSTER, "text"): Claim(
        lowest=1.05,
        highest=1.37,
        above_1_2=8,
        where="FCP, section 6.2 and Figure 3",
        bars={
            ("qwen3-8b", "github"): 1.37,
            ("llama3-8b", "github"): 1.36,
            ("qwen3-8b", "commoncrawl"): 1.30,
            ("llama3-8b", "commoncrawl"): 1.29,
            ("llama3.2-1b", "wikipedia"): 1.05,
        },
    ),
    (FCP_CLUSTER, "trained"): Claim(
        lowest=1.14,
        highest=1.38,
        above_1_2=15,
        where="FCP, section 6.2 and Figure 4",
        bars={
            ("internvl3-2b", "internvid"): 1.14,
            ("internvl3-8b", "msrvtt"): 1.38,
            ("internvl3-8b", "openvid"): 1.35,
            ("qwen3-vl-8b", "msrvtt"): 1.37,
            ("qwen3-vl-8b", "openvid"): 1.34,
        },
    ),
    (FCP_CLUSTER, "frozen"): Claim(
        lowest=1.16,
        highest=1.40,
        above_1_2=15,
        where="FCP, appendix C and Figure 6",
        bars={
            ("internvl3-2b", "internvid"): 1.16,
            ("internvl3-8b", "msrvtt"): 1.40,
            ("internvl3-8b", "openvid"): 1.37,
            ("qwen3-vl-8b", "msrvtt"): 1.39,
            ("qwen3-vl-8b", "openvid"): 1.35,
        },
    ),
    (DHP_CLUSTER, "trained"): Claim(
        lowest=1.14,
        highest=1.35,
        above_1_2=14,
        where="DHP, section 6.2 and Figure 6",
        bars={
            ("internvl3-8b", "msrvtt"): 1.14,
            ("internvl3-8b", "openvid"): 1.35,
            ("internvl2.5-4b", "openvid"): 1.28,
            ("qwen3-vl-8b", "openvid"): 1.32,
        },
    ),
    (DHP_CLUSTER, "frozen"): Claim(
        lowest=1.11,
        highest=1.36,
        above_1_2=None,
        where="DHP, section 6.2 and Figure 4",
        bars={("qwen3-vl-2b", "openvid"): 1.11, ("internvl3-8b", "openvid"): 1.36},
    ),
}

EXTREME_SPEEDUP = 2.24  # FCP, section 6.4.2: one sequence of 128k tokens, many of 2k to 8k
SCALING_SPEEDUPS = {8: 1.02, 64: 1.16}  # devices -> tokens per second over DeepSpeed; FCP, Figure 5, and DHP, Figure 5

# Planning beside computing for 512 sequences with Qwen3-VL-2B, devices -> seconds; FCP, table 2.
COMPUTE_SECONDS = {16: 34.45, 32: 18.26, 64: 11.65}
SCHEDULE_SECONDS = {16: 0.282, 32: 0.537, 64: 0.905}
