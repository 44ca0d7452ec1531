"""A server that speaks the part of Google Cloud Storage's JSON interface that checkpoints use."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_OBJECTS = "/storage/v1/b/"
_UPLOADS = "/upload/storage/v1/b/"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Nothing."""

    def do_POST(self) -> None:
        """Put an object."""
        parts = urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        objects = self._objects(parts.path.removeprefix(_UPLOADS).split("/")[0])
        if objects is not None:
            name = parse_qs(parts.query)["name"][0]
            objects[name] = content
            self._answer(200, _described(name, content))

    def do_GET(self) -> None:
        """Read an object, whole or in part, describe it, or list a bucket."""
        parts = urlsplit(self.path)
        bucket, _, name = parts.path.removeprefix(_OBJECTS).partition("/o")
        objects = self._objects(bucket)
        if objects is None:
            return
        asked = {key: values[0] for key, values in parse_qs(parts.query).items()}
        name = unquote(name.removeprefix("/"))
        if not name:
            first, end = asked.get("startOffset", ""), asked.get("endOffset")
            found = [n for n in sorted(objects) if n >= first and (end is None or n < end)]
            self._answer(200, {"items": [_described(n, objects[n]) for n in found]})
        elif name not in objects:
            self._refuse(404, f"No such object: {bucket}/{name}")
        elif asked.get("alt") == "media":
            self._send(objects[name])
        else:
            self._answer(200, _described(name, objects[name]))

    def do_DELETE(self) -> None:
        """Delete an object."""
        bucket, _, name = urlsplit(self.path).path.removeprefix(_OBJECTS).partition("/o/")
        objects = self._objects(bucket)
        if objects is not None:
            is_there = objects.pop(unquote(name), None) is not None
            self._answer(204, None) if is_there else self._refuse(404, "No such object")

    def _objects(self, bucket: str) -> dict[str, bytes] | None:
        if self.headers.get("authorization") != "Bearer token":
            self._refuse(401, "Invalid Credentials")
            return None
        if bucket not in self.server.buckets:
            self._refuse(404, "The specified bucket does not exist.")
            return None
        return self.server.buckets[bucket]

    def _send(self, content: bytes) -> None:
        headers = {"x-goog-generation": "1"}
        asked = self.headers.get("range", "").removeprefix("bytes=")
        status = 200
        if asked:
            first, _, last = asked.partition("-")
            start = int(first) if first else len(content) - int(last)
            end = min(int(last) + 1, len(content)) if first and last else len(content)
            if start >= len(content):
                self._refuse(416, "Requested range not satisfiable")
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            content = content[start:end]
        self._finish(status, content, headers)

    def _answer(self, status: int, value: Any) -> None:
        self._finish(status, b"" if value is None else json.dumps(value).encode(), {})

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"code": status, "message": message}})

    def _finish(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _described(name: str, content: bytes) -> dict[str, str]:
    return {
        "name": name,
        "generation": "1",
        "metageneration": "1",
        "size": str(len(content)),
        "timeCreated": "2026-01-01T00:00:00Z",
        "updated": "2026-01-01T00:00:00Z",
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.buckets: dict[str, dict[str, bytes]] = {}


@contextmanager
def fake_gcs(*buckets: str) -> Iterator[tuple[dict[str, str], dict[str, dict[str, bytes]]]]:
    """A server with these buckets: what a process has in its environment to use it, and they."""
    server = _Server()
    server.buckets.update({bucket: {} for bucket in buckets})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    variables = {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_address[1]}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "DIST_CKPT_STORE_TIMEOUT_S": "20",
    }
    try:
        yield variables, server.buckets
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
