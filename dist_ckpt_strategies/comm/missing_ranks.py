"""Which ranks have not reached a collective, or have died in it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dist_ckpt_strategies.comm.abortable_waits import run_abandonable
from dist_ckpt_strategies.errors import PeerLostError, PeerTimeoutError

_LOOKUP_S = 5.0
"""Longest wait for the job's key-value store, once a collective has failed."""

_LOOKUP_PAUSE_S = 0.05

_STATE, _FLAGS, _STARTED = 0, 6, 19
"""Where these stand in ``/proc/PID/stat``, counted behind the name; see proc(5)."""

_PF_EXITING = 0x4
"""In the flags of ``/proc/PID/stat``: the process ends, its connections are about to break off."""

_COUNTS: WeakKeyDictionary[Any, tuple[int, float, str]] = WeakKeyDictionary()
"""Collectives of each group so far, when the last one was reached, and a name of this process'
group: a later one may have torch's name of it. Torch's own sequence number counts messages between
single ranks too, and a group takes no attributes."""

_SHARE_OF_LIMIT = 0.5
"""A rank that reaches a collective later than this after the one before may come too late."""


class MissingRankTracker:
    """Notes in the job's key-value store which collective each rank has reached.

    A collective that times out does not say which rank it waited for. Each rank writes one key per
    collective: how many collectives of this package the group has had, which is equal on all
    ranks, and its process, so that ranks on the same host see that it has died.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        global_ranks: Sequence[int],
        purpose: str,
        timeout_s: float,
    ) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
        self._keys = {rank: f"dist_ckpt/{group.group_name}/{rank}" for rank in global_ranks}
        self._given_up_key = f"dist_ckpt/{group.group_name}/given_up"
        self._timeout_s = timeout_s
        self._may_be_late = False
        self._name = ""
        self._purpose = purpose
        self._group = group
        self._count = 0
        self._total = 0

    @property
    def what(self) -> str:
        """The current collective."""
        return f"{self._purpose}, collective {self._count}"

    def reach(self) -> None:
        """Note that this rank has reached the next collective."""
        self._count += 1
        now = time.monotonic()
        total, before, self._name = _COUNTS.get(self._group) or (0, 0.0, uuid.uuid4().hex)
        self._total = total + 1
        _COUNTS[self._group] = self._total, now, self._name
        self._may_be_late = now - before > _SHARE_OF_LIMIT * self._timeout_s
        try:
            name = process_name(os.getpid())
            text = f"{self._total} {self._name} {name}"
            self._store.set(self._keys[dist.get_rank()], text)
        except RuntimeError as error:
            raise PeerLostError(
                None, f"the job's key-value store does not answer: {self.what}: {error}"
            ) from error

    def require_awaited(self) -> None:
        """Raise if the other ranks had given up on this one before it reached the collective.

        What they sent may have arrived all the same. Asks the store where this rank may be late.

        Raises:
            PeerTimeoutError: they had.
            PeerLostError: the store does not answer.
        """
        if not self._may_be_late:
            return
        try:
            is_given_up = self._store.check([self._given_up_key]) and self._is_given_up()
        except RuntimeError as error:
            raise PeerLostError(
                None, f"the job's key-value store does not answer: {self.what}: {error}"
            ) from error
        if is_given_up:
            raise PeerTimeoutError(
                None,
                f"this rank arrived after others had waited for their whole limit: {self.what}",
            )

    def _is_given_up(self) -> bool:
        rank, total, name = self._store.get(self._given_up_key).decode().split()
        key = self._keys.get(int(rank))  # an earlier group of that name had other ranks
        if key is None or int(total) < self._total:
            return False
        return bool(self._store.get(key).decode().split()[1] == name)

    def missing(self, *, is_lost: bool) -> list[int] | None:
        """Global ranks to blame for a failed collective; None if the store does not answer.

        After a timeout, notes for late ranks that this rank has given up.

        After a timeout, those that have not reached it, else those whose processes on this host
        have ended. Where contact broke off, those that have ended, else those that have not
        reached it once slower ranks had time to.

        A question to a store hosted by a silent rank never returns, so it is asked over a new
        connection on a thread.
        """
        me = dist.get_rank()
        limit_s = min(self._timeout_s, _LOOKUP_S)

        def ask() -> list[int]:
            store = self._store.clone()
            if is_lost:
                return self._find_lost(store, limit_s / 2)
            store.set(self._given_up_key, f"{me} {self._total} {self._name}")
            ended, late = self._ended_and_late(store)
            return late or ended

        try:
            found: list[int] = run_abandonable(ask, limit_s, "the job's key-value store")
        except (RuntimeError, TimeoutError):
            return None
        return found

    def _find_lost(self, store: Any, limit_s: float) -> list[int]:
        deadline = time.monotonic() + limit_s
        while True:
            ended, late = self._ended_and_late(store)
            if ended or len(late) <= 1 or time.monotonic() >= deadline:
                return ended or late
            time.sleep(_LOOKUP_PAUSE_S)

    def _ended_and_late(self, store: Any) -> tuple[list[int], list[int]]:
        written = {rank: key for rank, key in self._keys.items() if store.check([key])}
        texts = store.multi_get(list(written.values())) if written else []
        found = dict.fromkeys(self._keys, "0")
        found |= {rank: text.decode() for rank, text in zip(written, texts, strict=True)}
        split = {rank: text.partition(" ") for rank, text in found.items()}
        ended = [rank for rank, (_, _, rest) in split.items() if has_ended(rest.partition(" ")[2])]
        return ended, [rank for rank, (count, _, _) in split.items() if int(count) < self._total]


def described(missing: list[int] | None) -> str:
    """Ranks, by their global numbers, in words; None where they are not known."""
    if missing is None:
        return "a peer (perhaps rank 0: the job's key-value store does not answer)"
    return f"ranks {missing}" if missing else "a peer"


@lru_cache(maxsize=1)
def _host_name() -> str:
    """Identifies this host and its process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


@lru_cache(maxsize=1)
def process_name(pid: int) -> str:
    """Identifies a process of this host among all, of other hosts and times; empty if unknown."""
    try:
        return f"{_host_name()} {pid} {_stat(pid)[_STARTED]}"
    except OSError:
        return ""


def has_ended(name: str) -> bool:
    """Whether a process with this ``process_name`` is known to have ended, or to be ending."""
    host, _, rest = name.partition(" ")
    pid, _, started = rest.partition(" ")
    try:
        if not started or host != _host_name():
            return False
        stat = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    is_ending = stat[_STATE] in {"Z", "X"} or bool(int(stat[_FLAGS]) & _PF_EXITING)
    return is_ending or stat[_STARTED] != started


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
