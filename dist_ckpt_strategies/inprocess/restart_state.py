"""The restart state of a job, in the launcher's store; docs/design/recovery.md has the keys."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum

from dist_ckpt_strategies.comm.key_values import TcpKeyValues
from dist_ckpt_strategies.errors import PeerError
from dist_ckpt_strategies.inprocess.coordinator import Fault, FaultMode, RankInfo

_EPOCH = "epoch"
_NO_FAULT = "none"
"""Replaces the fault of an epoch that all ranks have finished, so that no rank waits for one."""
_MAX_WHY = 2000


class BarrierState(StrEnum):
    """How a barrier ended."""

    OPEN = "open"
    BROKEN = "broken"


class FinishState(StrEnum):
    """How an epoch ended."""

    DONE = "done"
    BROKEN = "broken"


class RestartState:
    """Reads and writes the state of epochs and workers; only ``wait_*`` methods wait.

    Args:
        store: of the job.
        first_epoch: the number of the first epoch; the same for all.
    """

    def __init__(self, store: TcpKeyValues, first_epoch: int = 1) -> None:
        self._store = store
        self._first = str(first_epoch)

    def assign(self, worker: str, place: RankInfo) -> None:
        """Give a worker its place."""
        self._store.write(f"assign/{worker}", json.dumps(asdict(place)))

    def wait_place(self, worker: str, timeout_s: float | None) -> bool:
        """Whether a worker has been given a place in time; blocks all users of the store object."""
        return self._store.wait(f"assign/{worker}", timeout_s)

    def place(self, worker: str) -> RankInfo | None:
        """The place of a worker, None before it has one.

        Raises:
            PeerError: the store holds something else.
        """
        text = self._store.read(f"assign/{worker}")
        if text is None:
            return None
        try:
            found = json.loads(text)
            variables = tuple((str(name), str(value)) for name, value in found.pop("environment"))
            numbers = {name: int(value) for name, value in found.items()}
            return RankInfo(**numbers, environment=variables)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PeerError(None, f"expected a place in the job, found {text[:200]!r}") from error

    def note_ready(self, worker: str) -> None:
        """Note that a worker waits for its place, or has one."""
        self._store.write(f"ready/{worker}", "1")

    def is_ready(self, worker: str) -> bool:
        """Whether a worker waits for its place, or has one."""
        return self._store.has_all([f"ready/{worker}"])

    def current(self) -> int:
        """The forming or running epoch."""
        return int(self._store.write_once(_EPOCH, self._first))

    def join(self, epoch: int, worker: str, global_rank: int) -> int:
        """Note that a worker has joined, once per epoch; how many have by now."""
        # First the key that the death of a worker is reported by, then the count.
        self._store.write(f"joined/{worker}", str(epoch))
        self._store.write(f"arrived/{epoch}/{global_rank}", worker)
        return self._store.add(f"arrived/{epoch}")

    def announce_master(self, epoch: int, address: str) -> None:
        """Publish host and port of the store of an epoch's process groups, before rank 0 joins."""
        self._store.write(f"master/{epoch}", address)

    def master(self, epoch: int) -> str | None:
        """Host and port of the store of an epoch's process groups, None if none was announced."""
        return self._store.read(f"master/{epoch}")

    def joined(self, worker: str) -> int | None:
        """The last epoch that a worker has joined."""
        found = self._store.read(f"joined/{worker}")
        return None if found is None else int(found)

    def open_barrier(self, epoch: int) -> None:
        """Open the barrier, unless the epoch has been ended."""
        self._store.write_once(f"barrier/{epoch}", BarrierState.OPEN)

    def barrier(self, epoch: int) -> BarrierState | None:
        """How the barrier ended, None before."""
        found = self._store.read(f"barrier/{epoch}")
        return None if found is None else BarrierState(found)

    def has_begun(self) -> bool:
        """Whether all ranks have ever joined one epoch; looks at each of them."""
        epochs = range(int(self._first), self.current() + 1)
        return any(self.barrier(epoch) is BarrierState.OPEN for epoch in epochs)

    def count_return(self, epoch: int, global_rank: int) -> int:
        """Note that a rank has returned from the block; how many have. Once per rank and epoch."""
        self._store.write(f"returned/{epoch}/{global_rank}", "1")
        return self._store.add(f"returned/{epoch}")

    def mark_done(self, epoch: int) -> None:
        """Mark the epoch as done, unless it has been ended."""
        self._store.write_once(f"finish/{epoch}", FinishState.DONE)

    def finish(self, epoch: int) -> FinishState | None:
        """How the epoch ended, None before."""
        found = self._store.read(f"finish/{epoch}")
        return None if found is None else FinishState(found)

    def end(self, fault: Fault) -> None:
        """End the fault's epoch, unless it is no longer the current one."""
        if self.current() != fault.epoch:
            return
        content = {"rank": fault.global_rank, "mode": fault.mode, "why": fault.why[:_MAX_WHY]}
        self._store.write_once(f"fault/{fault.epoch}", json.dumps(content))
        self.settle(fault.epoch)

    def settle(self, epoch: int) -> FinishState:
        """Complete the end of an epoch that a fault has ended, or that all ranks finished.

        Every process that sees the end does this, as the one that ended the epoch may have died
        between two writes. Call it only for an epoch that has ended.
        """
        self._store.write_once(f"barrier/{epoch}", BarrierState.BROKEN)
        finish = FinishState(self._store.write_once(f"finish/{epoch}", FinishState.BROKEN))
        if finish is FinishState.DONE:
            self._store.write_once(f"fault/{epoch}", _NO_FAULT)
        self._store.replace(_EPOCH, str(epoch), str(epoch + 1))
        return finish

    def fault(self, epoch: int) -> Fault | None:
        """What ended an epoch; None before, and where all finished it."""
        text = self._store.read(f"fault/{epoch}")
        if text is None or self.settle(epoch) is FinishState.DONE:
            return None
        found = json.loads(text)
        return Fault(found["rank"], epoch, FaultMode(found["mode"]), found["why"])

    def wait_barrier(self, epoch: int) -> bool:
        """Wait until the barrier has opened or broken; blocks all users of the store object."""
        return self._store.wait(f"barrier/{epoch}")

    def wait_end(self, epoch: int) -> bool:
        """Wait until the epoch has ended; blocks all users of the store object."""
        return self._store.wait(f"fault/{epoch}")

    def missing(self, epoch: int, world_size: int) -> tuple[int, ...]:
        """Ranks that have not joined."""
        return self._without("arrived", epoch, world_size)

    def unfinished(self, epoch: int, world_size: int) -> tuple[int, ...]:
        """Ranks that have not returned from the block."""
        return self._without("returned", epoch, world_size)

    def _without(self, what: str, epoch: int, world_size: int) -> tuple[int, ...]:
        """Ranks without such a key, by halves: few questions where few are missing."""
        missing: list[int] = []
        unknown = [range(world_size)]
        while unknown:
            ranks = unknown.pop()
            if self._store.has_all([f"{what}/{epoch}/{rank}" for rank in ranks]):
                continue
            if len(ranks) == 1:
                missing.append(ranks[0])
                continue
            half = len(ranks) // 2
            unknown += [ranks[half:], ranks[:half]]
        return tuple(missing)
