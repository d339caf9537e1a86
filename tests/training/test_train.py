"""What a rank of the bundled trainer says when it ends early."""

from __future__ import annotations

import pytest

from fcp_cli.training import run, train
from fcp_cli.training.interrupt import StopRequest

pytestmark = pytest.mark.torch


def test_a_rank_that_heard_nothing_says_in_one_line_how_long_it_waited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def times_out(settings: object, stop: object) -> bool:
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation")

    monkeypatch.setattr(run, "train", times_out)
    monkeypatch.setattr(train, "end_with_launcher", lambda: None)
    monkeypatch.setattr(train, "parse_settings", lambda words: None)
    monkeypatch.setattr(StopRequest, "install", lambda stop: stop)
    assert train.main([]) == 1
    assert capsys.readouterr().err == (
        "error: waited 20 s in vain for another rank: it is stopped or slow, or the network between them is down; "
        "--rank-timeout is the time to wait\n"
    )
