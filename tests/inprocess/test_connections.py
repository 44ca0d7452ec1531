"""What a fault cuts of the connections that a block has opened: those of groups and stores."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from tests.support.restarts import HOST, Wrappers, join_group, run_restartable

pytestmark = pytest.mark.multiprocess

FAULTY = 1
LIMIT_S = 60.0
"""For all attempts; process groups have more, so that nothing but the abort ends a wait."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Says nothing."""


@pytest.fixture
def http_port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer((HOST, 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield int(server.server_address[1])
    server.shutdown()
    server.server_close()


class _Services:
    """Connections of a rank that are none of torch's: an HTTP client, a server, and its client."""

    def __init__(self, port: int) -> None:
        self.client = http.client.HTTPConnection(HOST, port, timeout=30)
        self.client.connect()
        self.client.auto_open = 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.reader, self.writer = self._done(self._open())

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                writer.write(line)

        server = await asyncio.start_server(echo, HOST, 0)
        return await asyncio.open_connection(HOST, server.sockets[0].getsockname()[1])

    async def _echoed(self) -> bytes:
        self.writer.write(b"ok\n")
        line: bytes = await self.reader.readline()
        return line

    def _done(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(30)

    def answer(self) -> list[bytes]:
        self.client.request("GET", "/")
        return [self.client.getresponse().read(), self._done(self._echoed())]


def in_the_world() -> None:
    dist.all_reduce(torch.ones(10))


def in_a_later_group() -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(10), group=group)


def in_a_group_that_is_made() -> None:
    dist.new_group([0, 1])
    dist.new_group([0, 1])


def in_a_store_of_its_own() -> None:
    """The group cannot be made: nobody else comes."""
    own = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    client = TCPStore(HOST, own.port, is_master=False, timeout=timedelta(seconds=100))
    dist.destroy_process_group()
    dist.init_process_group("interruptible_gloo", store=client, rank=0, world_size=2)


def in_the_store() -> None:
    dist.distributed_c10d._get_default_store().get("never written")


PLACES: list[Callable[[], None]] = [
    in_the_world,
    in_a_later_group,
    in_a_group_that_is_made,
    in_a_store_of_its_own,
    in_the_store,
]


def waits_in_each_place(rank: int, wrappers: Wrappers, port: int, backend: str) -> Any:
    """Body of a rank: in attempt i, one raises while the other waits in place i."""
    services: list[_Services] = []

    @wrappers()
    def block(call: HPCallWrapper) -> list[list[bytes]]:
        services.append(_Services(port))
        answers = [one.answer() for one in services]
        join_group(backend)
        dist.barrier()
        attempt = call.num_attempts - 1
        if attempt == len(PLACES):
            return answers
        if rank == FAULTY:
            if PLACES[attempt] in {in_a_later_group, in_a_group_that_is_made}:
                dist.new_group([0, 1])
            raise ValueError("on purpose")
        PLACES[attempt]()
        raise AssertionError("nothing has interrupted this")

    return block()


@pytest.mark.parametrize("backend", ["gloo", "interruptible_gloo"])
def test_groups_and_stores_are_cut_and_nothing_else_is(http_port: int, backend: str) -> None:
    found = run_restartable(2, waits_in_each_place, http_port, backend, timeout_s=LIMIT_S)

    expected = [[b"ok", b"ok\n"]] * (len(PLACES) + 1)
    assert found == [expected, expected]
