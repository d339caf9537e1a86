"""MindSpeed's settings: the command line of the script, read when it is asked for first."""

import argparse
from functools import cache


@cache
def get_full_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-algo", default="megatron_cp_algo")
    parser.add_argument("--attention-mask-type", default="causal")
    parser.add_argument("--cp-window-size", type=int, default=1)
    parser.add_argument("--use-cp-send-recv-overlap", action="store_true")
    parser.add_argument("--alibi-fusion-attn-type", type=int)
    parser.add_argument("--tp-2d", action="store_true")
    return parser.parse_known_args()[0]
