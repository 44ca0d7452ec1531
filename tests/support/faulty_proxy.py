"""A proxy before an object store that misbehaves on request."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.object_stores import ObjectStore

_TIMEOUT_S = 100.0
_DROPPED = {"connection", "transfer-encoding", "keep-alive"}


@dataclass
class Request:
    """What somebody asked for."""

    method: str  # ``PUT`` and so on
    path: str  # bucket and name, with what follows
    nbytes: int = 0  # size of what was sent, or of the answer to a GET; 0 until that is known


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a request."""

    delay_s: float = 0.0  # wait so long before anything else
    status: int | None = None  # answer with this, in place of the server
    is_cut: bool = False  # pass half of the server's answer on, and close
    content: bytes = b""  # goes with ``status``


NONE = Fault()
BUSY = Fault(status=503)
DENIED = Fault(status=403, content=b"<Error><Code>AccessDenied</Code><Message>No</Message></Error>")
Decide = Callable[[Request], Fault]


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to a server, each with the fault that is decided for it.

    Clients use ``store`` in place of the server. While it ``is_down``, connections are closed
    without an answer, those whose request was passed on too.
    """

    daemon_threads = True
    request_queue_size = 128  # a further client is served a second later

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.decide: Decide = lambda _: NONE
        self.is_down = False
        self.requests: list[Request] = []
        self.store = replace(store, endpoint=f"http://127.0.0.1:{self.server_port}")
        self._target = urlsplit(store.endpoint)
        self._ended = threading.Event()
        self._noting = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Let no request wait any longer."""
        self._ended.set()
        self.shutdown()
        self.server_close()

    @contextmanager
    def faulty(self, decide: Decide) -> Iterator[None]:
        """Within the block requests have these faults."""
        self.decide = decide
        try:
            yield
        finally:
            self.decide = lambda _: NONE

    def fault_of(self, request: Request) -> Fault:
        """Note a request; what is to happen to it, once it has waited."""
        with self._noting:
            self.requests.append(request)
            fault = self.decide(request)  # of one request after the other
        self._ended.wait(fault.delay_s)
        return fault

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the server answers."""
        host, port = str(self._target.hostname), self._target.port
        with closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Nothing."""

    def _pass_on(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, len(body))
        fault = proxy.fault_of(request)
        if fault.status is not None:
            content = b"" if self.command == "HEAD" else fault.content  # an answer to it has none
            self._answer(fault.status, [("ETag", '"0"')], content, is_cut=False)
            return
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        try:
            if proxy.is_down:
                raise ConnectionAbortedError
            status, found, content = proxy.forward(self.command, self.path, headers, body)
            if proxy.is_down:
                raise ConnectionAbortedError
        except OSError:
            self.close_connection = True  # as the server does
            return
        if self.command == "GET":
            request.nbytes = len(content)
        self._answer(status, found, content, is_cut=fault.is_cut)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, is_cut: bool
    ) -> None:
        self.send_response_only(status)
        kept = {name.lower(): value for name, value in headers if name.lower() not in _DROPPED}
        kept.setdefault("content-length", str(len(content)))  # HEAD has the object's
        for name, value in kept.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection = self.close_connection or is_cut

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on  # noqa: N815 - names there
