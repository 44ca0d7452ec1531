"""Which ranks are missing when a collective of a group fails.

A collective that times out does not say which rank it waited for. So each rank notes in the job's
key-value store how many collectives of this package the group has had, a number that is equal on
all ranks; its process, so that ranks on the same host see that it has died; and by what error of
its own it leaves.
"""

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.abort import run_abandonable
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    is_of_communication,
    message_device,
)
from dist_ckpt_strategies.errors import PeerError, PeerLostError, PeerTimeoutError, text_of
from dist_ckpt_strategies.storage.host import has_ended, process_name

_LOOKUP_S = 5.0
"""Longest wait for the job's key-value store, once a collective has failed."""

_LOOKUP_PAUSE_S = 0.05


class GroupProgress:
    """How far this rank is in the collectives of one group, and what it notes of that.

    Attributes:
        name: of this group alone; a later one may have torch's name of it.
        device: where its messages have to be.
        total: collectives so far. (Torch's own number counts messages between single ranks too.)
        failure: this rank's own error since the last collective.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.name = uuid.uuid4().hex
        self.device: torch.device = message_device(group)
        self.total = 0
        self.failure = ""
        self._reached_at = 0.0
        self._me = dist.get_rank()
        self._store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
        prefix = f"dist_ckpt/{group.group_name}"
        self._keys = {rank: f"{prefix}/{rank}" for rank in dist.get_process_group_ranks(group)}
        self._given_up_key = f"{prefix}/given_up"

    def begin_collective(self) -> float:
        """Count a collective; the seconds since the one before."""
        before, self._reached_at = self._reached_at, time.monotonic()
        self.total += 1
        return self._reached_at - before

    def write_note(self, store: Any = None) -> None:
        """Note how far this rank is, for those that will look for it."""
        note = f"{self.total} {self.name} {process_name(os.getpid())}\n{self.failure}"
        (self._store if store is None else store).set(self._keys[self._me], note)

    def note_failure(self, error: BaseException) -> None:
        """Note by what error this rank leaves. What comes from a peer is no error of its own."""
        if is_of_communication(error):
            return
        text = f"{type(error).__name__}: {text_of(error)}"
        self.failure = text.encode(errors="replace").decode()
        with suppress(RuntimeError, TimeoutError):
            run_abandonable(lambda: self.write_note(self._store.clone()), _LOOKUP_S, "")

    def require_awaited(self, what: str) -> None:
        """Raise if the other ranks had given up on this one before it reached the collective.

        What they sent may have arrived all the same.
        """
        if not self._store.check([self._given_up_key]):
            return
        rank, total, name = self._store.get(self._given_up_key).decode().split()
        key = self._keys.get(int(rank))  # an earlier group of that name had other ranks
        if key is None or int(total) < self.total:
            return
        if self._store.get(key).decode().split()[1] == name:
            raise PeerTimeoutError(
                None,
                "this rank reached the collective after others had waited for their whole limit: "
                f"{what}",
            )

    def peer_error(
        self, error: BaseException, what: str, timeout_s: float, peer: int | None, *, is_lost: bool
    ) -> PeerError:
        """The error for a collective that failed, with the ranks that it waited for.

        ``is_lost``: contact broke off before the timeout. ``peer`` is the rank, if it is known.
        """
        missing = {peer: ""} if peer is not None else self._missing(timeout_s, is_lost=is_lost)
        if missing is None:
            who = "a peer (perhaps rank 0: the job's key-value store does not answer)"
        else:
            who = f"ranks {list(missing)}" if missing else "a peer"
        first, why = next(iter(missing or {}), None), "".join((missing or {}).values())
        if not is_lost:
            late = f"{who} did not reach this collective within {timeout_s:g} s: {what}"
            return PeerTimeoutError(first, late + why)
        return PeerLostError(
            first if missing and len(missing) == 1 else None,
            f"lost contact with {who}: {what}: {error}{why}",
        )

    def _missing(self, timeout_s: float, *, is_lost: bool) -> dict[int, str] | None:
        """Global ranks that a failed collective waited for, each with a text for the message.

        First the ranks that left by an error of their own. Else after a timeout the ranks that
        have not reached the collective; if all have, those whose process on this host has ended.
        Where contact broke off, those that have ended come first, and slower ranks get time to
        reach it. After a timeout, notes for late ranks that this rank has given up.

        None if the store does not answer. A store on a silent host never does, so a thread asks
        over a new connection.
        """
        limit_s = min(timeout_s, _LOOKUP_S)
        total = self.total  # the thread may go on after it was given up
        others = {rank: key for rank, key in self._keys.items() if rank != self._me}

        def ask() -> dict[int, str]:
            store = self._store.clone()
            self.write_note(store)
            if not is_lost:
                store.set(self._given_up_key, f"{self._me} {total} {self.name}")
                ended, late, failed = _ended_and_late(store, others, total)
                return failed or dict.fromkeys(late or ended, "")
            deadline = time.monotonic() + limit_s / 2
            while True:
                ended, late, failed = _ended_and_late(store, others, total)
                if failed or ended or len(late) <= 1 or time.monotonic() >= deadline:
                    return failed or dict.fromkeys(ended or late, "")
                time.sleep(_LOOKUP_PAUSE_S)

        try:
            found: dict[int, str] = run_abandonable(ask, limit_s, "the job's key-value store")
        except (RuntimeError, TimeoutError):
            return None
        return found


_OF_GROUPS: WeakKeyDictionary[ProcessGroup, GroupProgress] = WeakKeyDictionary()
"""A process group takes no attributes."""


def progress_of(group: ProcessGroup) -> GroupProgress:
    """The one record of a group, which all its communicators share."""
    if group not in _OF_GROUPS:
        _OF_GROUPS[group] = GroupProgress(group)
    return _OF_GROUPS[group]


def _ended_and_late(
    store: Any, keys: Mapping[int, str], total: int
) -> tuple[list[int], list[int], dict[int, str]]:
    """Ranks whose processes have ended, and those that have not reached so many collectives.

    Of those that left by an error of their own also a text.
    """
    written = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(written.values())) if written else []
    notes = {r: text.decode().partition("\n") for r, text in zip(written, texts, strict=True)}
    found = {rank: note.split(" ", 2) for rank, (note, _, _) in notes.items()}
    ended = [rank for rank, (_, _, process) in found.items() if has_ended(process)]
    late = [rank for rank in keys if rank not in found or int(found[rank][0]) < total]
    left = "; rank {} left by an error of its own: {}"
    failed = {
        rank: left.format(rank, why)
        for rank, (*_, why) in notes.items()
        if why and int(found[rank][0]) >= total - 1  # else it has gone on since
    }
    return ended, late, failed
