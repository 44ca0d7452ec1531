"""A server that speaks the part of Google Cloud Storage's JSON interface that checkpoints use."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from flask import Flask, request, send_file
from werkzeug.serving import make_server

Buckets = dict[str, dict[str, bytes]]
_OBJECTS = "/storage/v1/b/<bucket>/o"


class _Api:
    """What is done with requests."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self.app = Flask(__name__)
        self.app.url_map.merge_slashes = False
        self.app.before_request(self._check)
        self.app.post(f"/upload{_OBJECTS}")(self._put)
        self.app.get(_OBJECTS)(self._find)
        self.app.get(f"{_OBJECTS}/<path:name>")(self._read)
        self.app.delete(f"{_OBJECTS}/<path:name>")(self._delete)

    def _check(self) -> Any:
        if request.headers.get("authorization") != "Bearer token":
            return _refused(401, "Invalid Credentials")
        if (request.view_args or {}).get("bucket") not in self._buckets:
            return _refused(404, "The specified bucket does not exist.")
        return None

    def _put(self, bucket: str) -> Any:
        name = request.args["name"]
        self._buckets[bucket][name] = request.get_data()
        return _described(name, self._buckets[bucket][name])

    def _find(self, bucket: str) -> Any:
        first, end = request.args.get("startOffset", ""), request.args.get("endOffset")
        found = sorted(self._buckets[bucket].items())
        found = [(n, c) for n, c in found if n >= first and (end is None or n < end)]
        return {"items": [_described(name, content) for name, content in found]}

    def _read(self, bucket: str, name: str) -> Any:
        content = self._buckets[bucket].get(name)
        if content is None:
            return _refused(404, f"No such object: {bucket}/{name}")
        if request.args.get("alt") != "media":
            return _described(name, content)
        answer = send_file(BytesIO(content), "application/octet-stream", conditional=True)
        answer.headers["x-goog-generation"] = "1"
        return answer

    def _delete(self, bucket: str, name: str) -> Any:
        is_there = self._buckets[bucket].pop(name, None) is not None
        return ("", 204) if is_there else _refused(404, "No such object")


def _refused(status: int, message: str) -> Any:
    return {"error": {"code": status, "message": message}}, status


def _described(name: str, content: bytes) -> dict[str, str]:
    return {
        "name": name,
        "generation": "1",
        "metageneration": "1",
        "size": str(len(content)),
        "timeCreated": "2026-01-01T00:00:00Z",
        "updated": "2026-01-01T00:00:00Z",
    }


@contextmanager
def fake_gcs(*names: str) -> Iterator[tuple[dict[str, str], Buckets]]:
    """A server with these buckets: what a process has in its environment to use it, and they."""
    buckets: Buckets = {name: {} for name in names}
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, _Api(buckets).app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    variables = {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "DIST_CKPT_STORE_TIMEOUT_S": "20",
    }
    try:
        yield variables, buckets
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
