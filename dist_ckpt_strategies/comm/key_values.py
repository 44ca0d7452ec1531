"""Keys and values that outlive ranks: a TCPStore, and clients with a time limit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError, DistStoreError

from dist_ckpt_strategies.comm.abortable_waits import AbortableWaits
from dist_ckpt_strategies.errors import PeerError, PeerLostError, WaitReleasedError, text_of

T = TypeVar("T")

_LONGEST_WAIT_S = 86400.0
"""Of one request: torch's client warns on stderr each time that one ends without a result. That the
host is lost is learnt from other requests."""

_NUM_LOOKS = 3
"""After so many pauses without an answer a request is given up."""


class TcpKeyValues:
    """A client of a TCPStore: text by key, never empty.

    Each method raises PeerLostError if the store is gone, or silent for too long; only ``wait``
    waits. Torch's client waits for ever for a host that is stopped, or has lost its network, so
    requests are made on a thread, which is abandoned then.

    Args:
        host: of the store.
        port: of the store.
        prefix: of all keys.
        timeout_s: after which a silent host is lost, in seconds. A request, and the
            connection, may take half of it.
        beside: the same store over another connection, on which ``wait`` checks that the host
            still answers.

    Raises:
        PeerLostError: there is no store, or it does not answer.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        prefix: str = "",
        timeout_s: float = 30.0,
        beside: TcpKeyValues | None = None,
    ) -> None:
        self._place = (host, port)
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._beside = beside
        self._is_silent = False
        self._waits = AbortableWaits("dist_ckpt-store")
        self._store = self._asked(
            lambda: TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s / 2),
            )
        )

    def read(self, key: str) -> str | None:
        """The value; None where no rank has written one."""
        # Comparing with a value that no key has would do it in one question, but where the key is
        # missing that wakes all who wait for it (torch 2.13).
        if not self.has_all([key]):
            return None
        found: bytes = self._asked(lambda: self._store.get(self._prefix + key))
        return found.decode()

    def write(self, key: str, value: str) -> None:
        """Set the value; once this returns, every rank reads it."""
        name = self._prefix + key
        self._asked(lambda: self._store.set(name, value))
        # Setting does not wait for an answer, so the question after it does.
        self._asked(lambda: self._store.check([name]))

    def write_once(self, key: str, value: str) -> str:
        """Set the value where there is none; the value that is there then."""
        return self.replace(key, "", value)

    def replace(self, key: str, expected: str, value: str) -> str:
        """Set the value where it is the expected one; the value that is there then."""
        name = self._prefix + key
        found: bytes = self._asked(lambda: self._store.compare_set(name, expected, value))
        return found.decode()

    def add(self, key: str) -> int:
        """Count one more; the count, this one included. Such keys are for counting alone."""
        return self._asked(lambda: self._store.add(self._prefix + key, 1))

    def has_all(self, keys: Sequence[str]) -> bool:
        """Whether each of the keys has been written; one question, however many they are."""
        names = [self._prefix + key for key in keys]
        return self._asked(lambda: self._store.check(names))

    def wait(self, key: str, timeout_s: float | None = None) -> bool:
        """Whether the key has been written in time. Holds up all others who ask this object.

        Without ``timeout_s`` it waits until then.
        """
        longest_s = _LONGEST_WAIT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + longest_s

        def woken() -> bool:
            left_s = max(0.001, deadline - time.monotonic())
            try:
                self._store.wait([self._prefix + key], timedelta(seconds=left_s))
            except DistStoreError:
                return False
            return True

        def meanwhile() -> None:
            if self._beside is not None:
                self._beside.has_all([key])
            elif time.monotonic() > deadline + self._timeout_s / 2:
                raise self._lost("no answer")

        while self._asked(woken, meanwhile):
            if self.has_all([key]):  # else it was woken by a question; see ``read``
                return True
        return False

    def another(self) -> TcpKeyValues:
        """The same store, over a connection that learns over this one that the host is silent."""
        host, port = self._place
        return TcpKeyValues(host, port, prefix=self._prefix, timeout_s=self._timeout_s, beside=self)

    def close(self) -> None:
        """Give up the connection; its socket is closed with the last reference."""
        vars(self).pop("_store", None)
        self._waits.abort()

    def _asked(self, ask: Callable[[], T], meanwhile: Callable[[], None] | None = None) -> T:
        limit_s = self._timeout_s / 2
        num_looks = itertools.count(1)

        def require_answer() -> None:
            # Where this process itself has been stopped, the first look comes at once.
            if next(num_looks) >= _NUM_LOOKS:
                self._is_silent = True
                raise self._lost(f"no answer for {limit_s:g} s")

        if self._is_silent:
            raise self._lost("it has been silent for too long")
        try:
            return cast(
                "T", self._waits.run(ask, meanwhile or require_answer, limit_s / _NUM_LOOKS)
            )
        except (DistError, AttributeError, WaitReleasedError) as error:  # the latter two: closed
            raise self._lost(text_of(error).partition("\n")[0]) from error

    def _lost(self, why: str) -> PeerLostError:
        host, port = self._place
        return PeerLostError(
            None, f"the coordinator's store at {host}:{port} does not answer: {why}"
        )


class TcpHost:
    """A TCPStore in this process; it ends with this object, and all others of that port.

    Args:
        host: the address that others reach it at.
        port: of it; 0: one that is free.

    Raises:
        PeerError: the port is taken.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        try:
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, multi_tenant=port != 0
            )
        except DistError as error:
            reason = str(error).partition("\n")[0]
            raise PeerError(None, f"no store at {host}:{port}: {reason}") from error
        self.port = int(self._store.port)
