"""Who has arrived at a collective, and who has not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dist_ckpt_strategies.errors import PeerLostError

_LOOKUP_S = 5.0
"""Longest wait for the job's key-value store, once a collective has failed."""

_LOOKUP_PAUSE_S = 0.05

_PF_EXITING = 0x4
"""In the flags of ``/proc/PID/stat``: the process ends, its connections are about to break off."""

_MEETINGS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Collectives of each group so far. It belongs to the group, which takes no attributes; torch's
own sequence number does not serve, it counts messages between single ranks too."""


class Attendance:
    """Each rank's last sign of life in the job's key-value store, to tell who is missing.

    A collective that times out does not say which rank it waited for. One small write per
    collective, to a key that every rank has once, lets the others look it up when that happens.
    What is written is how many collectives of this package the group has had: equal on all ranks,
    whatever else the job does with the group, and never the same twice. The process is named with
    it: a rank that has signed and died is known to those on its host.
    """

    def __init__(self, group: dist.ProcessGroup, global_ranks: Sequence[int], purpose: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
        self._keys = {rank: f"dist_ckpt/{group.group_name}/{rank}" for rank in global_ranks}
        self._mine = self._keys[dist.get_rank()]
        self._purpose = purpose
        self._group = group
        self._process = process_name(os.getpid())
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
            self._store.set(self._mine, f"{self._total} {self._process}")
        except RuntimeError as error:
            raise PeerLostError(
                None, f"the job's key-value store does not answer: {self.what}: {error}"
            ) from error

    def absent(self, timeout_s: float) -> list[int] | None:
        """Global ranks that have not signed for the collective under way; None if unknown.

        If there are none, those whose processes on this host have ended.

        The store may be hosted by the very rank that is silent, and a question to it then never
        returns: it is asked over a connection and on a thread of its own.
        """
        return self._looked_up(self._late, timeout_s)

    def lost(self, timeout_s: float) -> list[int] | None:
        """Global ranks whose processes on this host have ended; None if unknown.

        If there are none, those that have not signed, once the merely slower had time to.
        """
        deadline = time.monotonic() + min(timeout_s, _LOOKUP_S) / 2
        return self._looked_up(lambda store: self._gone(store, deadline), timeout_s)

    def _looked_up(self, look: Callable[[Any], list[int]], timeout_s: float) -> list[int] | None:
        answers: list[list[int]] = []

        def ask() -> None:
            store: Any = self._store
            with suppress(RuntimeError):
                answers.append(look(store.clone()))

        reader = threading.Thread(target=ask, daemon=True)
        reader.start()
        reader.join(min(timeout_s, _LOOKUP_S))
        return answers[0] if answers else None

    def _late(self, store: Any) -> list[int]:
        signs = self._signs(store)
        return self._unsigned(signs) or _ended(signs)

    def _gone(self, store: Any, deadline: float) -> list[int]:
        """Those that have ended; else those unsigned, when at most one is or the time is up."""
        while True:
            signs = self._signs(store)
            ended = _ended(signs)
            found = ended or self._unsigned(signs)
            if ended or len(found) <= 1 or time.monotonic() >= deadline:
                return found
            time.sleep(_LOOKUP_PAUSE_S)

    def _signs(self, store: Any) -> dict[int, str]:
        """What each rank has written last."""
        return {
            rank: store.get(key).decode() if store.check([key]) else ""
            for rank, key in self._keys.items()
        }

    def _unsigned(self, signs: Mapping[int, str]) -> list[int]:
        """Ranks that are neither at this collective nor past it."""
        counts = {rank: int(sign.partition(" ")[0] or 0) for rank, sign in signs.items()}
        return [rank for rank, count in counts.items() if count < self._total]


def _ended(signs: Mapping[int, str]) -> list[int]:
    """Ranks whose processes on this host have ended."""
    return [rank for rank, sign in signs.items() if has_ended(sign.partition(" ")[2])]


def described(absent: list[int] | None) -> str:
    """Ranks, by their global numbers, in words; None where they are not known."""
    if absent is None:
        return "a peer (perhaps rank 0: the job's key-value store does not answer)"
    return f"ranks {absent}" if absent else "a peer"


def host_name() -> str | None:
    """What tells this host, and what of it this process can see, from others; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return None
    return f"{boot}/{processes}"


@lru_cache(maxsize=1)
def process_name(pid: int) -> str:
    """What tells a process of this host from all others, of other hosts and other times too."""
    try:
        return f"{host_name()} {pid} {_stat(pid)[_STARTED]}"
    except OSError:
        return ""


def has_ended(name: str) -> bool:
    """Whether a process that gave itself this name is known to have ended, or to be ending."""
    host, _, rest = name.partition(" ")
    pid, _, started = rest.partition(" ")
    if not started or host != host_name():
        return False
    try:
        stat = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return not _exists(int(pid))  # it may be hidden, as another user's
    except OSError:
        return False
    is_ending = stat[_STATE] in {"Z", "X"} or int(stat[_FLAGS]) & _PF_EXITING
    return stat[_STARTED] != started or bool(is_ending)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    else:
        return True


_STATE, _FLAGS, _STARTED = 0, 6, 19
"""Where these stand in ``/proc/PID/stat``, counted behind the name; see proc(5)."""


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
