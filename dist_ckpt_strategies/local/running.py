"""Which places and process groups this process still uses behind training."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dist_ckpt_strategies.comm.agree import limit_of_wait
from dist_ckpt_strategies.comm.base import Communicator, Exchange, Message, Receive, Send
from dist_ckpt_strategies.comm.process_group import ProcessGroup, group_itself
from dist_ckpt_strategies.local.background import BackgroundWork
from dist_ckpt_strategies.storage.locations import Location


class RunningSaves:
    """The saves of this process that go on behind training, by the place that they write to.

    Whoever begins another one there waits for them first, whichever strategy wrote them: their
    files may have the names of the new ones. One that has ended is not kept for this: with it goes
    the memory that it was written from.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: list[tuple[str, weakref.ref[BackgroundWork[Any]]]] = []

    def add(self, place: Location, work: BackgroundWork[Any]) -> None:
        """Take note of one that has begun; it lives as long as its thread, at least."""
        with self._lock:
            running = [(known, held) for known, held in self._works if held() is not None]
            self._works = [*running, (_name_of(place), weakref.ref(work))]

    def wait(self, place: Location, timeout_s: float) -> None:
        """Return when all that write to a place have ended, well or not. Rank-local.

        Raises:
            SaveTimeoutError: that takes longer.
        """
        name = _name_of(place)
        with self._lock:
            held = [work() for known, work in self._works if known == name]
        deadline = time.monotonic() + timeout_s
        for work in filter(None, held):
            work.wait(max(0.0, deadline - time.monotonic()))


RUNNING_SAVES = RunningSaves()
"""Those of this process."""


class GroupUsers:
    """The save behind training that has last sent over each process group.

    Messages of two that use a group at once would be taken for each other: gloo ends the process
    then. A save is not kept alive for this: its own thread does that, as long as it runs.
    """

    def __init__(self) -> None:
        self._works: WeakKeyDictionary[ProcessGroup, weakref.ref[BackgroundWork[Any]]] = (
            WeakKeyDictionary()
        )

    def note(self, group: ProcessGroup | None, work: BackgroundWork[Any]) -> None:
        """Have ``wait`` wait for a save. Rank-local."""
        itself = group_itself(group)
        if itself is not None:
            self._works[itself] = weakref.ref(work)

    def wait(self, group: ProcessGroup | None, timeout_s: float) -> None:
        """Return when no save behind training sends over a group any more. Rank-local.

        Raises:
            SaveTimeoutError: one goes on for longer.
        """
        itself = group_itself(group)
        held = self._works.get(itself) if itself is not None else None
        work = held() if held is not None else None
        if work is not None:
            work.wait(timeout_s, "a save behind training over the same process group")


GROUP_USERS = GroupUsers()
"""Those of this process."""


class PatientCommunicator:
    """A Communicator that lets saves behind training finish before it uses their group itself.

    Whatever it is asked for, it raises SaveTimeoutError where one goes on for most of the limit.

    Args:
        comm: asked once the group is free.
        group: that ``comm`` uses.
        timeout_s: longest wait of ``comm`` for a peer.
    """

    def __init__(self, comm: Communicator, group: ProcessGroup | None, timeout_s: float) -> None:
        self._comm = comm
        self._group = group
        self._timeout_s = timeout_s

    @property
    def rank(self) -> int:
        """See Communicator."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """See Communicator."""
        return self._comm.size

    @property
    def device(self) -> torch.device:
        """See Communicator."""
        return self._comm.device

    def global_rank(self, rank: int) -> int:
        """See Communicator."""
        return self._comm.global_rank(rank)

    def all_gather(self, item: Message) -> list[Message]:
        """See Communicator."""
        self._let_finish()
        return self._comm.all_gather(item)

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See Communicator."""
        self._let_finish()
        self._comm.exchange(sends, receives)

    def begin_exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Exchange:
        """See Communicator."""
        self._let_finish()
        return self._comm.begin_exchange(sends, receives)

    def _let_finish(self) -> None:
        GROUP_USERS.wait(self._group, limit_of_wait(self._timeout_s))


def _name_of(place: Location) -> str:
    return str(place.resolve() if isinstance(place, Path) else place)
