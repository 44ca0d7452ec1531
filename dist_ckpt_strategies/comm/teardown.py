"""Ends all communication of this process; keeps the groups of one attempt from those of others."""

import atexit
import ctypes
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dist_ckpt_strategies.comm.abort import abort_nccl
from dist_ckpt_strategies.comm.interruptible_gloo import InterruptibleGloo
from dist_ckpt_strategies.comm.process_group import uses_nccl
from dist_ckpt_strategies.device import ABORTED

logger = logging.getLogger(__name__)

_PAUSE_S = 0.005
_DESTROY_S = 1.0
_EXIT_S = 10.0
GRACE_S = 2.0
"""Longest time for sockets to close before waits are aborted all the same."""

_undestroyed: list[tuple[Any, list[Any]]] = []
"""Gloo groups of earlier attempts, each with works that had not completed."""


def num_undestroyed_groups(timeout_s: float = _DESTROY_S) -> int:
    """Destroy gloo groups of earlier attempts whose works have all completed; how many are left.

    The destructor of a group waits for the group's timeout where gloo has forgotten the buffer of
    a message, so a group with pending works is kept. What is left when the interpreter exits is
    never destroyed: a destructor that returns at that time would abort the process.
    """
    found = list(_undestroyed)
    _undestroyed.clear()
    ready: list[Any] = []
    while found:
        group, works = found.pop()
        while works and works[-1].is_completed():
            works.pop()
        if works:
            _undestroyed.append((group, works))
        else:
            ready.append(group)
        del group
    if ready:
        with suppress(RuntimeError):  # from Python 3.12 on no thread starts at the end of a script
            _drop_in_a_thread(ready).join(timeout_s)
    return len(_undestroyed)


def _take_down(groups: list[InterruptibleGloo]) -> None:
    for group in groups:
        inner, pending = group.take_down()
        if inner is not None:
            _undestroyed.append((inner, pending))
        del inner


@atexit.register
def _end_groups() -> None:
    """Destroy the groups that the script has left, or keep them for ever.

    A thread of gloo that was held up since its work completed may be the last to hold a tensor. To
    release it while the interpreter exits aborts the process. The destructor waits for the threads.
    """
    _take_down(InterruptibleGloo.abort_all())
    num_undestroyed_groups(_EXIT_S)
    for group, _ in _undestroyed:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class Communication:
    """The process groups of this process, and its connections to their stores, in one attempt.

    Sockets that are open when this object is made are left alone.
    """

    def __init__(self) -> None:
        num_undestroyed_groups()
        self._lock = threading.Lock()
        self.is_ended = False
        """Whether ``end`` has been called, and has come to its end."""
        self._older = frozenset(open_sockets())
        self._stores: set[tuple[str, int]] = set()
        self._aborted: set[Any] = set()
        ABORTED.clear()
        InterruptibleGloo.allow_new()

    def note_store(self, store: Any) -> None:
        """Have ``end`` cut the connections to a store; those of the groups are known."""
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            with suppress(socket.gaierror):
                found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
                self._stores |= {_plain(address[:2]) for *_, address in found}

    def end(self) -> None:
        """Cut the connections of all groups and their stores, then abort all waits.

        In this order: while a connection is open, bytes may still arrive in a tensor whose owner
        waits no longer. What a wait returns from now on is not used; see ``raise_if_aborted``.
        """
        begun = time.monotonic()
        ABORTED.set()
        for _, store in _known_groups().values():
            self.note_store(store)
        num_cut = 0
        while num_open := self.cut():
            num_cut += num_open
            if time.monotonic() - begun > GRACE_S:
                logger.warning("%d connections are still open after %g s", num_open, GRACE_S)
                break
            time.sleep(_PAUSE_S)
        InterruptibleGloo.abort_all()
        self.is_ended = True
        logger.debug("%d connections cut in %.3f s", num_cut, time.monotonic() - begun)

    def cut(self) -> int:
        """Cut connections; how many were open. More may come: call it again.

        NCCL groups that have been made since the last call are aborted.
        """
        with self._lock:
            new = [g for g in _known_groups() if g not in self._aborted and uses_nccl(g)]
            self._aborted.update(new)
            abort_nccl(new)
            return _shut_down(self._older, self._stores)

    def take_down(self) -> None:
        """Destroy all process groups of this process.

        For the thread that made them, once it uses none of them any more.
        """
        aborted = InterruptibleGloo.abort_all()
        groups = list(_known_groups())
        self._aborted.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        # Torch names groups by a count that it resets when it destroys the world. An initialisation
        # that was interrupted counts too, and leaves nothing to destroy: this rank's next world
        # would look for the others under a name that they do not have.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - no public way
        _take_down(aborted)
        num_undestroyed_groups()
        others = [[group] for group in groups if not isinstance(group, InterruptibleGloo)]
        groups.clear()
        for held in others:
            _drop_in_a_thread(held)
        ABORTED.clear()  # what is made from now on is another attempt's, or the caller's own


def _drop_in_a_thread(held: list[Any]) -> threading.Thread:
    """Empty a list of groups on a thread of its own: their destructors may block."""
    thread = threading.Thread(target=held.clear, name="dist_ckpt-group-destruction", daemon=True)
    thread.start()
    return thread


def _known_groups() -> dict[Any, tuple[Any, Any]]:
    """Backend and store of each group."""
    return dict(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - no public way


# Connections of gloo's groups, and to stores

_OWN = Path("/proc/self")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_EPOLL = "anon_inode:[eventpoll]"
_WATCHED = re.compile(r"^tfd: *(\d+) .*data: *([0-9a-f]+) .*ino:([0-9a-f]+)", re.MULTILINE)
_LOW_32_BITS = 0xFFFFFFFF


def open_sockets() -> dict[int, int]:
    """File descriptors of the sockets of this process, by inode.

    Sockets are identified by inode: the numbers of file descriptors are used again.
    """
    found = ((_SOCKET.match(target), fd) for fd, target in _open_files())
    return {int(match[1]): fd for match, fd in found if match}


def _open_files() -> Iterator[tuple[int, str]]:
    for file in (_OWN / "fd").iterdir():
        with suppress(OSError):  # closed since it was listed
            yield int(file.name), str(file.readlink())


def _shut_down(older: Collection[int], stores: Collection[tuple[str, int]]) -> int:
    """Shut down connections of gloo's groups and those to stores; how many were still open.

    Their readers see the end of the stream. Sockets that listen are left alone: gloo ends the
    process if its own is shut down.
    """
    with ExitStack() as closing:
        listening: set[int] = set()
        connections: dict[int, socket.socket] = {}
        for inode, fd in open_sockets().items():
            if inode in older:
                continue
            with suppress(OSError):  # closed since it was listed
                copy = closing.enter_context(socket.socket(fileno=os.dup(fd)))
                is_tcp = copy.family in {socket.AF_INET, socket.AF_INET6}
                if not is_tcp or copy.type != socket.SOCK_STREAM:
                    continue
                if os.fstat(copy.fileno()).st_ino != inode:
                    continue
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(inode)
                else:
                    connections[inode] = copy
        groups = _watched_by_gloo(listening)
        num_cut = 0
        for inode, one in connections.items():
            with suppress(OSError):  # not connected, or not any more
                if inode in groups or _plain(one.getpeername()[:2]) in stores:
                    one.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
        return num_cut


def _watched_by_gloo(listening: Collection[int]) -> set[int]:
    """Inodes of all that is watched together with one of these listening sockets.

    Each group of gloo has an epoll instance for its listening socket and its connections. Python's
    and libuv's servers have one too, and keep the file descriptor as data, gloo keeps an address.
    """
    found: set[int] = set()
    for epoll in [fd for fd, target in _open_files() if target == _EPOLL]:
        with suppress(OSError):  # closed since it was listed
            watched = _WATCHED.findall((_OWN / "fdinfo" / str(epoll)).read_text())
            inodes = {int(inode, 16) for _, _, inode in watched}
            is_by_number = any(int(data, 16) & _LOW_32_BITS == int(fd) for fd, data, _ in watched)
            if not is_by_number and not inodes.isdisjoint(listening):
                found |= inodes
    return found


def _plain(address: Any) -> tuple[str, int]:
    """Host and port; an IPv4 address as such, where a socket of IPv6 has mapped it."""
    host, port = address
    return str(host).removeprefix("::ffff:"), port


# Rendezvous by attempt


@contextmanager
def rendezvous_by_attempt(
    attempt: Callable[[], int], note_store: Callable[[Any], None]
) -> Iterator[None]:
    """While this is open, ``init_process_group`` finds only ranks in the same attempt.

    That is, without a store of the caller's: with ``env://`` or ``tcp://``. The launcher's store
    outlives the attempts, and with it the addresses of dead connections: torch gives them the same
    names each time (torch 2.13; older ones looked at TORCHELASTIC_RESTART_COUNT). It has no public
    way to replace a handler; the one that was there comes back.

    ``attempt`` gives its number, the same on all ranks; ``note_store`` is given each store that
    ranks find each other in.
    """
    module = import_module("torch.distributed.rendezvous")  # a function has its name in torch
    handlers = module._rendezvous_handlers  # noqa: SLF001 - see above

    def by_attempt(handler: Callable[..., Any]) -> Callable[..., Any]:
        def rendezvous(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
            for store, rank, size in handler(*args, **kwargs):
                note_store(store)
                yield PrefixStore(f"dist_ckpt/attempt/{attempt()}", store), rank, size

        return rendezvous

    before = {scheme: handlers[scheme] for scheme in ("env", "tcp")}
    handlers.update({scheme: by_attempt(handler) for scheme, handler in before.items()})
    try:
        yield
    finally:
        handlers.update(before)
