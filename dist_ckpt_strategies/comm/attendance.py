"""Who has arrived at a collective, and who has not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dist_ckpt_strategies.errors import PeerLostError

_LOOKUP_S = 5.0
"""Longest wait for the job's key-value store, once a collective has failed."""

_LOOKUP_PAUSE_S = 0.05

_MEETINGS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Collectives of each group so far. It belongs to the group, which takes no attributes; torch's
own sequence number does not serve, it counts messages between single ranks too."""


class Attendance:
    """Each rank's last sign of life in the job's key-value store, to tell who is missing.

    A collective that times out does not say which rank it waited for. One small write per
    collective, to a key that every rank has once, lets the others look it up when that happens.
    What is written is how many collectives of this package the group has had: equal on all ranks,
    whatever else the job does with the group, and never the same twice.
    """

    def __init__(self, group: dist.ProcessGroup, global_ranks: Sequence[int], purpose: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
        self._keys = {rank: f"dist_ckpt/{group.group_name}/{rank}" for rank in global_ranks}
        self._mine = self._keys[dist.get_rank()]
        self._purpose = purpose
        self._group = group
        self._count = 0
        self._total = 0

    @property
    def what(self) -> str:
        """The collective under way."""
        return f"{self._purpose}, meeting {self._count}"

    def sign(self) -> None:
        """Note that this rank has reached the next collective."""
        self._count += 1
        self._total = _MEETINGS[self._group] = _MEETINGS.get(self._group, 0) + 1
        try:
            self._store.set(self._mine, str(self._total))
        except RuntimeError as error:
            raise PeerLostError(
                None, f"the job's key-value store does not answer: {self.what}: {error}"
            ) from error

    def absent(self, timeout_s: float) -> list[int] | None:
        """Global ranks that have not signed for the collective under way; None if unknown.

        The store may be hosted by the very rank that is silent, and a question to it then never
        returns: it is asked over a connection and on a thread of its own.
        """
        return self._looked_up(time.monotonic(), min(timeout_s, _LOOKUP_S))

    def lost(self, timeout_s: float) -> list[int] | None:
        """Global ranks that have not signed, once those that are merely slower had time to."""
        limit_s = min(timeout_s, _LOOKUP_S)
        return self._looked_up(time.monotonic() + limit_s / 2, limit_s)

    def _looked_up(self, deadline: float, limit_s: float) -> list[int] | None:
        answers: list[list[int]] = []
        reader = threading.Thread(
            target=lambda: answers.extend(self._answers(deadline)), daemon=True
        )
        reader.start()
        reader.join(limit_s)
        return answers[0] if answers else None

    def _answers(self, deadline: float) -> list[list[int]]:
        """Who has not signed, when at most one is left or the time is up; nothing if unknown."""
        try:
            store: Any = self._store
            store = store.clone()
            while len(found := self._unsigned(store)) > 1 and time.monotonic() < deadline:
                time.sleep(_LOOKUP_PAUSE_S)
        except RuntimeError:
            return []
        return [found]

    def _unsigned(self, store: Any) -> list[int]:
        return [rank for rank, key in self._keys.items() if not self._has_signed(store, key)]

    def _has_signed(self, store: Any, key: str) -> bool:
        """Whether a rank is at this collective, or past it."""
        return bool(store.check([key]) and int(store.get(key)) >= self._total)


def described(absent: list[int] | None) -> str:
    """Ranks, by their global numbers, in words; None where they are not known."""
    if absent is None:
        return "a peer (perhaps rank 0: the job's key-value store does not answer)"
    return f"ranks {absent}" if absent else "a peer"
