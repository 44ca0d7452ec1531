"""Ends all communication of this process; keeps the groups of one attempt from those of others."""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dist_ckpt_strategies.comm.abortable_waits import ABORTED
from dist_ckpt_strategies.comm.interruptible_gloo import InterruptibleGloo
from dist_ckpt_strategies.comm.process_group import abort_nccl
from dist_ckpt_strategies.comm.sockets import (
    Address,
    addresses_of,
    open_sockets,
    shut_down_groups,
)

logger = logging.getLogger(__name__)

_PAUSE_S = 0.005
_SCHEMES = ("env", "tcp")
_DESTROY_S = 1.0
GRACE_S = 2.0
"""Longest time for sockets to close before waits are aborted all the same."""

_undestroyed: list[tuple[Any, list[Any]]] = []
"""Gloo groups of earlier attempts, each with works that had not completed."""


def num_undestroyed_groups() -> int:
    """Destroy gloo groups of earlier attempts whose works have all completed; how many are left.

    The destructor of a group waits for the group's timeout where gloo has forgotten the buffer of
    a message, so a group with pending works is kept. What is left when the interpreter exits is
    never destroyed: a destructor that returns at that time would abort the process.
    """
    kept: list[tuple[Any, list[Any]]] = []
    ready: list[Any] = []
    for group, works in _undestroyed:
        if _have_completed(works):
            ready.append(group)
        else:
            kept.append((group, works))
    _undestroyed[:] = kept
    if ready:
        del group
        _drop_in_a_thread(ready).join(_DESTROY_S)
    return len(kept)


def _have_completed(works: list[Any]) -> bool:
    while works and works[-1].is_completed():
        works.pop()
    return not works


@atexit.register
def _keep_undestroyed() -> None:
    for group, _ in _undestroyed:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class Communication:
    """The process groups of this process, and its connections to their stores, in one attempt.

    Sockets that are open when this object is made are left alone.
    """

    def __init__(self) -> None:
        num_undestroyed_groups()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._older = frozenset(open_sockets())
        self._stores: frozenset[Address] = frozenset()
        self._num_aborted = 0
        ABORTED.clear()
        InterruptibleGloo.allow_new()

    def note_store(self, store: Any) -> None:
        """Have ``end`` cut the connections to a store; those of the groups are known."""
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            self._stores |= addresses_of(store.host, store.port)

    @property
    def is_ended(self) -> bool:
        """Whether ``end`` has been called, and has come to its end."""
        return self._ended.is_set()

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
        self._ended.set()
        logger.debug("%d connections cut in %.3f s", num_cut, time.monotonic() - begun)

    def cut(self) -> int:
        """Cut connections; how many were open. More may come: call it again.

        NCCL groups that have been made since the last call are aborted.
        """
        with self._lock:
            groups = list(_known_groups())
            new, self._num_aborted = groups[self._num_aborted :], len(groups)
            abort_nccl(new)
            return shut_down_groups(self._older, self._stores)

    def take_down(self) -> int:
        """Destroy all process groups of this process; how many there were.

        For the thread that made them, once it uses none of them any more.
        """
        aborted = InterruptibleGloo.abort_all()
        groups = list(_known_groups())
        num_groups = len(groups)
        if dist.is_available():
            _destroy_all()
        for group in aborted:
            inner, pending = group.take_down()
            if inner is not None:
                _undestroyed.append((inner, pending))
            del inner
        num_undestroyed_groups()
        others = [[group] for group in groups if not isinstance(group, InterruptibleGloo)]
        groups.clear()
        for held in others:
            _drop_in_a_thread(held)
        ABORTED.clear()  # what is made from now on is another attempt's, or the caller's own
        return num_groups


def _drop_in_a_thread(held: list[Any]) -> threading.Thread:
    """Empty a list of groups on a thread of its own: their destructors may block."""
    thread = threading.Thread(target=held.clear, name="dist_ckpt-group-destruction", daemon=True)
    thread.start()
    return thread


def _destroy_all() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Torch names groups by a count that it resets when it destroys the world. An initialisation
    # that was interrupted counts too, and leaves nothing to destroy: this rank's next world would
    # look for the others under a name that they do not have.
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - no public way


def _known_groups() -> dict[Any, tuple[Any, Any]]:
    """Backend and store of each group."""
    if not dist.is_available():
        return {}
    return dict(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - no public way


def store_of_attempt(base: Any, attempt: str) -> Any:
    """A store over another one, with keys of this attempt only."""
    return PrefixStore(f"attempt{attempt}", base)


@contextmanager
def rendezvous_by_attempt(
    attempt: Callable[[], int], note_store: Callable[[Any], None]
) -> Iterator[None]:
    """While this is open, ``init_process_group`` finds only ranks in the same attempt.

    That is, without a store of the caller's: with ``env://`` or ``tcp://``. The launcher's store
    outlives the attempts, and with it the addresses of dead connections: torch gives them the same
    names each time (torch 2.13; older ones looked at TORCHELASTIC_RESTART_COUNT). It has no public
    way to replace a handler; the one that was there comes back.

    Args:
        attempt: its number, the same on all ranks.
        note_store: is given each store that ranks find each other in.
    """
    module = import_module("torch.distributed.rendezvous")  # a function has its name in torch
    handlers = module._rendezvous_handlers  # noqa: SLF001 - see above
    before = {scheme: handlers[scheme] for scheme in _SCHEMES}
    handlers.update({name: _apart(found, attempt, note_store) for name, found in before.items()})
    try:
        yield
    finally:
        handlers.update(before)


def _apart(
    handler: Callable[..., Any], attempt: Callable[[], int], note_store: Callable[[Any], None]
) -> Callable[..., Any]:
    def by_attempt(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, size in handler(*args, **kwargs):
            note_store(store)
            yield PrefixStore(f"dist_ckpt/attempt/{attempt()}", store), rank, size

    return by_attempt
