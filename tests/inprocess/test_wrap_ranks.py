"""The restart loop over real ranks: a fault anywhere, and all run the block again.

A fault cuts the connections of process groups and stores, and no others.
"""

from __future__ import annotations

import asyncio
import http.client
import http.server
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dist_ckpt_strategies.inprocess.abort import CheckpointlessAbortManager
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from tests.support.ranks import allow_processes
from tests.support.restarts import HOST, Wrappers, join_group, run_restartable

pytestmark = pytest.mark.multiprocess

FAULTY = 2
SIZE = 4
LIMIT_S = 30.0
"""From the fault to the next attempt; nothing else ends a wait in that time."""


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


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(100)
        return torch.zeros(1)


def in_all_reduce() -> None:
    dist.all_reduce(torch.ones(1000))


def in_all_gather() -> None:
    dist.all_gather([torch.empty(10) for _ in range(SIZE)], torch.ones(10))


def in_barrier() -> None:
    dist.barrier()


def in_recv() -> None:
    dist.recv(torch.ones(10), FAULTY)


def in_objects() -> None:
    dist.all_gather_object([None] * SIZE, "x")


def in_new_group() -> None:
    dist.new_group(list(range(SIZE)))


def in_a_later_group() -> None:
    dist.all_reduce(torch.ones(10), group=dist.new_group(list(range(SIZE))))


def in_a_store_of_its_own() -> None:
    """The group cannot be made: nobody else comes."""
    own = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    client = TCPStore(HOST, own.port, is_master=False, timeout=timedelta(seconds=100))
    dist.destroy_process_group()
    dist.init_process_group("interruptible_gloo", store=client, rank=0, world_size=SIZE)


def in_the_store() -> None:
    dist.distributed_c10d._get_default_store().get("never written")


def in_sleep() -> None:
    time.sleep(100)


def in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def in_a_queue() -> None:
    queue.Queue[int]().get()


def in_a_loop() -> None:
    while True:
        pass


def in_a_data_loader() -> None:
    # As in a script of its own. Ranks of these tests would start a server first, and by that a
    # worker that the fault may find half begun, and that outlives the test.
    loader = torch.utils.data.DataLoader(_Slow(), num_workers=1, multiprocessing_context="fork")
    next(iter(loader))


PLACES: list[Callable[[], None]] = [
    in_all_reduce,
    in_all_gather,
    in_barrier,
    in_recv,
    in_objects,
    in_new_group,
    in_a_later_group,
    in_a_store_of_its_own,
    in_the_store,
    in_sleep,
    in_a_lock,
    in_a_queue,
    in_a_loop,
    in_a_data_loader,
]


def one_fault_in_each_place(rank: int, wrapper: Wrappers, port: int, backend: str) -> list[Any]:
    """Body of a rank: in attempt ``i``, the faulty one raises while the others are in place i."""
    waits: list[float] = []
    causes: list[str] = []
    services: list[_Services] = []
    attempts: Iterator[int] = iter(range(1000))
    since = [0.0]

    @wrapper(abort=CheckpointlessAbortManager.get_default_checkpointless_abort())
    def block(call: HPCallWrapper | None = None) -> tuple[float, list[list[bytes]]]:
        attempt = next(attempts)
        if attempt:
            waits.append(time.monotonic() - since[0])
            causes.append(call.last_fault.why if call else "")
        services.append(_Services(port))
        answers = [one.answer() for one in services]
        join_group(backend)
        dist.barrier()
        if attempt == len(PLACES):
            total = torch.tensor(float(rank))
            dist.all_reduce(total)
            return float(total), answers
        if rank == FAULTY:
            if PLACES[attempt] is in_a_later_group:
                dist.new_group(list(range(SIZE)))
            time.sleep(0.05)
            since[0] = time.monotonic()
            raise ValueError(f"fault {attempt}")
        since[0] = time.monotonic() + 0.05
        PLACES[attempt]()
        raise AssertionError("nobody has interrupted this")

    allow_processes()
    return [*block(), waits, causes]


@pytest.mark.parametrize("backend", ["gloo", "interruptible_gloo"])
def test_a_fault_ends_whatever_the_others_wait_for_and_cuts_no_other_connection(
    backend: str, http_port: int
) -> None:
    results = run_restartable(SIZE, one_fault_in_each_place, http_port, backend)

    for result in results:
        assert not isinstance(result, Exception), (result, result.__notes__)
        total, answers, waits, causes = result
        assert total == 6.0
        assert answers == [[b"ok", b"ok\n"]] * (len(PLACES) + 1)
        assert causes == [f"ValueError: fault {attempt}" for attempt in range(len(PLACES))]
        assert max(waits) < LIMIT_S, dict(zip(PLACES, waits, strict=True))
