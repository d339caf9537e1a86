"""Ctrl-C waits for the end of a block, and then means what it always means."""

from __future__ import annotations

import os
import signal

import pytest

from fcp_cli.util.processes import interrupts_deferred


def test_ctrl_c_inside_the_block_is_raised_at_its_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all of the block")
    assert done == ["all of the block"]


def test_the_handler_that_stood_before_is_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_deferred():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_of_the_block_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="own"), interrupts_deferred():
        raise ValueError("own")
