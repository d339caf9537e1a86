"""MindSpeed's settings: the command line of the script."""

import argparse

_MINDSPEED_ARGS: argparse.Namespace | None = None


def get_full_args() -> argparse.Namespace:
    assert _MINDSPEED_ARGS is not None
    return _MINDSPEED_ARGS
