"""What a rank of the bundled trainer says when it ends early."""

from __future__ import annotations

import pytest

from fcp_cli.runtime.stop_request import StopRequest
from fcp_cli.training import train, trainer

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("raised", "printed"),
    [
        (
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation",
            "error: waited 20 s in vain for another rank: it is stopped or slow, or the network between them is down; "
            "--rank-timeout is the time to wait\n",
        ),
        (
            "[/__w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2599: Connection reset by peer. This is "
            "typically caused by a remote worker hanging. Check the logs of the remote worker. GLHF!",
            "lost the connection to another rank: Read error [127.0.0.1]:2599: Connection reset by peer.\n",
        ),
    ],
)
def test_what_a_rank_hears_or_does_not_hear_of_another_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: str, printed: str
) -> None:
    def fails(settings: object, stop: object) -> bool:
        raise RuntimeError(raised)

    monkeypatch.setattr(trainer, "train", fails)
    monkeypatch.setattr(train, "end_with_launcher", lambda: None)
    monkeypatch.setattr(train, "parse_settings", lambda words: None)
    monkeypatch.setattr(StopRequest, "install", lambda stop: stop)
    assert train.main([]) == 1
    assert capsys.readouterr().err == printed
