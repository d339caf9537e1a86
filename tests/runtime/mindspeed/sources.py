"""Where tests find MindSpeed: a stand-in of theirs, or real sources where somebody has them."""

from __future__ import annotations

import os

import pytest

from tests.runtime.launch import ROOT

STAND_IN = ROOT / "tests" / "runtime" / "mindspeed" / "stand_in"
# MindSpeed imports MegatronAdaptor from megatron-core 0.17 on.
ADAPTOR = STAND_IN.with_name("adaptor_stand_in")


def real_sources() -> tuple[str, ...]:
    """Folders of Megatron, MindSpeed and what it imports; the test is skipped where they are not named."""
    mindspeed, megatron = (os.environ.get(f"FCP_{name}_SOURCE") for name in ("MINDSPEED", "MEGATRON"))
    if not mindspeed or not megatron:
        pytest.skip(
            "opt-in: FCP_MINDSPEED_SOURCE names a checkout of MindSpeed, and FCP_MEGATRON_SOURCE a folder made by "
            "'pip install --no-deps --target FOLDER megatron-core==VERSION einops', of the branch's line"
        )
    return megatron, mindspeed, str(ADAPTOR)
