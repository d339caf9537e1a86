"""The options of msrun, as recorded from MindSpore 2.10: `mindspore/parallel/cluster/run.py`.

A test compares the record with MindSpore's own parser where that is installed.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from typing import Any

OPTIONS: dict[str, Callable[[str], Any]] = {
    "--worker_num": int,
    "--local_worker_num": int,
    "--master_addr": str,
    "--master_port": int,
    "--node_rank": int,
    "--log_dir": str,
    "--join": ast.literal_eval,
    "--cluster_time_out": int,
    "--bind_core": str,
    "--bind_numa": str,
    "--sim_level": int,
    "--sim_rank_id": int,
    "--rank_table_file": str,
    "--worker_log_name": str,
    "--tail_worker_log": str,
}


def parser() -> argparse.ArgumentParser:
    """Takes what msrun takes."""
    made = argparse.ArgumentParser(prog="msrun")
    for option, kind in OPTIONS.items():
        made.add_argument(option, type=kind)
    made.add_argument("task_script")
    made.add_argument("task_script_args", nargs=argparse.REMAINDER)
    return made
