"""The key-value store of a job: a TCPStore, and a client of it whose requests have a time limit."""

import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError, DistStoreError

from dist_ckpt_strategies.comm.abort import AbortableWaits
from dist_ckpt_strategies.comm.teardown import open_sockets
from dist_ckpt_strategies.config import place_from_environment
from dist_ckpt_strategies.errors import PeerError, PeerLostError, text_of

_LONGEST_WAIT_S = 86400.0
"""Of one request: torch's client warns on stderr each time that one ends without a result."""

_NUM_LOOKS = 3
"""Number of timeouts before a request fails. More than one, because a process that was suspended
sees the first timeout at once."""


class JobStore:
    """A client of a TCPStore for text, with one connection for requests and one for ``wait``.

    Every method raises PeerLostError if the store is gone, or silent for too long. Torch's client
    waits for ever for a host that is stopped or has lost its network, so each request runs on a
    thread, which is abandoned then.

    After ``timeout_s`` a silent host is lost. A request, and the connection, may take half of it.
    """

    def __init__(
        self, host: str, port: int, *, prefix: str = "dist_ckpt", timeout_s: float = 30.0
    ) -> None:
        self._address = f"{host}:{port}"
        self._limit_s = timeout_s / 2
        self._is_silent = False
        self._calls = AbortableWaits("dist_ckpt-store")
        limit = timedelta(seconds=self._limit_s)

        def connect() -> PrefixStore:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
            return PrefixStore(prefix, store)

        self._connections = [self._ask(connect), self._ask(connect)]
        _bound_silence(port, self._limit_s)

    def get(self, key: str) -> str | None:
        """The value; None where there is none."""

        # A compare_set with a value that no key has would take one request, but where the key is
        # missing that wakes all who wait for it (torch 2.13).
        def read() -> bytes | None:
            store = self._connections[0]
            return store.get(key) if store.check([key]) else None

        found = self._ask(read)
        return None if found is None else found.decode()

    def set(self, key: str, value: str) -> None:
        """Set the value; once this returns, every rank reads it."""

        def write() -> None:
            store = self._connections[0]
            store.set(key, value)
            store.check([key])  # ``set`` does not wait for an answer

        self._ask(write)

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set the value where it is the expected one, or "" and none; the value from then on."""
        found: bytes = self._ask(lambda: self._connections[0].compare_set(key, expected, value))
        return found.decode()

    def add(self, key: str) -> int:
        """Count one more; the count, this one included. Such keys are for counting alone."""
        return int(self._ask(lambda: self._connections[0].add(key, 1)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether each of the keys has been set; one request, however many they are."""
        return bool(self._ask(lambda: self._connections[0].check(list(keys))))

    def has_foreign_keys(self, prefix: str) -> bool:
        """Whether others have set keys of that prefix; False where torch cannot say.

        It lists all keys.
        """

        def found() -> bool:
            store = self._connections[0].underlying_store
            keys = store.list_keys() if hasattr(store, "list_keys") else ()
            return any(key.startswith(prefix) for key in keys)

        return bool(self._ask(found))

    def wait(self, key: str, timeout_s: float | None = None) -> bool:
        """Whether the key has been set in time; without ``timeout_s``, wait until then.

        One wait at a time. Meanwhile other requests check that the host still answers.
        """
        deadline = time.monotonic() + (_LONGEST_WAIT_S if timeout_s is None else timeout_s)

        def is_woken() -> bool:
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                self._connections[1].wait([key], left)
            except DistStoreError:
                return False
            return True

        while self._ask(is_woken, lambda: self.check([key])):
            if self.check([key]):  # else it was woken by a compare_set; see ``get``
                return True
        return False

    def close(self) -> None:
        """Give up the connections; their sockets are closed with the last reference."""
        self._calls.abort()
        self._connections = []

    def _ask(self, request: Callable[[], Any], meanwhile: Callable[[], Any] | None = None) -> Any:
        num_looks = itertools.count(1)

        def require_answer() -> None:
            if next(num_looks) >= _NUM_LOOKS:
                self._is_silent = True
                raise self._lost(f"no answer for {self._limit_s:g} s")

        if self._is_silent:
            raise self._lost("it has been silent for too long")
        try:
            return self._calls.run(request, meanwhile or require_answer, self._limit_s / _NUM_LOOKS)
        except (DistError, IndexError) as error:  # the latter: closed
            raise self._lost(text_of(error).partition("\n")[0]) from error

    def _lost(self, why: str) -> PeerLostError:
        return PeerLostError(
            None, f"the rendezvous store at {self._address} does not answer: {why}"
        )


def require_place() -> None:
    """Raise a PeerLostError if another node has this node's place, or the store does not answer.

    A process that was stopped for long may wake up before it is killed; a commit asks this first.
    """
    place = place_from_environment()
    if place is None:
        return
    (host, port), key, node = place
    store = JobStore(host, port)
    owner = (store.get(key) or "").partition("#")[0]
    store.close()
    if owner != node:
        raise PeerLostError(
            None, f"{key} of the job was node {node}'s, and is {owner or 'no node'}'s now"
        )


def _bound_silence(port: int, limit_s: float) -> None:
    """Have the kernel end this process's connections to a port when the host is silent.

    Torch's client asks for that on none of its sockets, and has no way to it. It also keeps alive
    the connection of a wait of hours, over which nothing else is sent.
    """
    probe_s = max(1, int(limit_s / _NUM_LOOKS))
    options = {
        socket.TCP_KEEPIDLE: probe_s,
        socket.TCP_KEEPINTVL: probe_s,
        socket.TCP_KEEPCNT: _NUM_LOOKS - 1,
        socket.TCP_USER_TIMEOUT: int(limit_s * 1000),
    }
    for fd in open_sockets().values():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:  # closed since, or no TCP
            if one.family in {socket.AF_INET, socket.AF_INET6} and one.getpeername()[1] == port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in options.items():
                    one.setsockopt(socket.IPPROTO_TCP, option, value)


def host_store(host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """A TCPStore's server in this process, which ends with the last reference to it.

    ``host`` is the address that others reach it at; port 0 is one that is free. A PeerError if the
    port is taken.
    """
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=port != 0)
    except DistError as error:
        reason = str(error).partition("\n")[0]
        raise PeerError(None, f"no store at {host}:{port}: {reason}") from error
