"""Stores that tests read from: a server of HTTP with ranges, and a proxy that fails between a client and any server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Faults:
    """What goes wrong: every `errors`-th answer to a read is a 500, every `cuts`-th ends halfway; 0: none does.

    Attributes:
        served: bytes of content that were sent.
        reads: requests of content, failed ones included.
    """

    errors: int = 0
    cuts: int = 0
    served: int = 0
    reads: int = 0
    failed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self) -> str:
        with self.lock:
            self.reads += 1
            fault = "error" if self.errors and self.reads % self.errors == 0 else ""
            fault = fault or ("cut" if self.cuts and self.reads % self.cuts == 0 else "")
            self.failed += bool(fault)
            return fault


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP on a free port of this machine; yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def store_of(
    objects: dict[str, bytes], faults: Faults, before_read: Callable[[str], None] = lambda name: None
) -> type[BaseHTTPRequestHandler]:
    """Return a handler that serves objects by their names, in ranges."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            before_read(self.path)
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            content = objects.get(self.path)
            if content is None:
                self.send_error(404)
                return
            fault = faults.next_fault() if has_body else ""
            if fault == "error":
                self.send_error(500)
                return
            start, stop = 0, len(content)
            asked = self.headers.get("Range")
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, stop = int(first), min(int(last) + 1, len(content))
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{hash(content)}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(stop - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            self.end_headers()
            if has_body:
                end = (start + stop) // 2 if fault == "cut" else stop
                with faults.lock:
                    faults.served += end - start
                self.wfile.write(content[start:end])
                self.close_connection = self.close_connection or fault == "cut"

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


@contextmanager
def failing_proxy(port: int, faults: Faults) -> Iterator[str]:
    """Pass connections on to a port of this machine, each for one request; yields the URL of the proxy."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def accept() -> None:
        while not ended.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_pass_on, args=(client, port, faults), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _pass_on(client: socket.socket, port: int, faults: Faults) -> None:
    with client:
        request = b""
        while b"\r\n\r\n" not in request:
            piece = client.recv(1 << 16)
            if not piece:
                return
            request += piece
        head, _, body = request.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        fault = faults.next_fault() if head.startswith(b"GET") and b"range:" in head.lower() else ""
        if fault == "error":
            client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", port)) as server:
            server.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body)
            answer = b""
            while piece := server.recv(1 << 16):
                answer += piece
        end = len(answer) - (len(answer) - answer.index(b"\r\n\r\n")) // 2 if fault == "cut" else len(answer)
        client.sendall(answer[:end])
        faults.served += end
