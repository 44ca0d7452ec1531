"""What the store says of the epochs: the keys of docs/design/recovery.md, in their order."""

from __future__ import annotations

import json
from enum import StrEnum

from dist_ckpt_strategies.comm.key_values import KeyValues
from dist_ckpt_strategies.inprocess.coordinator import Fault, FaultMode

_EPOCH = "epoch"
_NO_FAULT = "none"
"""Stands in place of the fault of an epoch that all have finished: nobody waits for one then."""
_MAX_WHY = 2000


class BarrierState(StrEnum):
    """What became of a barrier."""

    OPEN = "open"
    BROKEN = "broken"


class FinishState(StrEnum):
    """What became of an epoch."""

    DONE = "done"
    BROKEN = "broken"


class EpochBook:
    """Reads and writes the keys of the epochs; no method waits but those whose names say so.

    Args:
        store: of the job.
        first_epoch: the number of the first one; all say the same.
    """

    def __init__(self, store: KeyValues, first_epoch: int = 1) -> None:
        self._store = store
        self._first = str(first_epoch)

    def current(self) -> int:
        """The forming or running epoch."""
        return int(self._store.write_once(_EPOCH, self._first))

    def join(self, epoch: int, worker: str, global_rank: int) -> int:
        """Note that a worker has joined; how many have, it included. Once per worker and epoch."""
        # The death of a worker counts against what it joined, so nobody may be counted whose
        # joining cannot be read yet.
        self._store.write(_joined(worker), str(epoch))
        self._store.write(f"arrived/{epoch}/{global_rank}", worker)
        return self._store.add(f"arrived/{epoch}")

    def announce_master(self, epoch: int, address: str) -> None:
        """Say where the process groups of an epoch meet; rank 0 does, before it joins."""
        self._store.write(f"master/{epoch}", address)

    def master(self, epoch: int) -> str | None:
        """Where the process groups of an epoch meet, as host:port; None: nobody has said."""
        return self._store.read(f"master/{epoch}")

    def joined(self, worker: str) -> int | None:
        """The last epoch that a worker has joined."""
        found = self._store.read(_joined(worker))
        return None if found is None else int(found)

    def open_barrier(self, epoch: int) -> None:
        """Say that all have joined, unless the epoch has been ended."""
        self._store.write_once(f"barrier/{epoch}", BarrierState.OPEN)

    def barrier(self, epoch: int) -> BarrierState | None:
        """What became of the barrier, None before."""
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
        """Say that all have returned, unless the epoch has been ended."""
        self._store.write_once(f"finish/{epoch}", FinishState.DONE)

    def finish(self, epoch: int) -> FinishState | None:
        """What became of the epoch, None before."""
        found = self._store.read(f"finish/{epoch}")
        return None if found is None else FinishState(found)

    def end(self, fault: Fault) -> None:
        """End the fault's epoch, unless it is no longer the current one."""
        if self.current() != fault.epoch:
            return
        self._store.write_once(f"fault/{fault.epoch}", _text_of(fault))
        self.settle(fault.epoch)

    def settle(self, epoch: int) -> FinishState:
        """Do what is left of the end of an epoch that a fault has ended, or that all finished.

        Whoever sees one end does this: who ended it may have died between two writes. Never call
        it for an epoch of which nothing tells that it has ended.
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
        return _fault_of(text, epoch)

    def wait_barrier(self, epoch: int) -> bool:
        """Whether the barrier has opened or been broken by now; holds up as ``wait_end`` does."""
        return self._store.wait(f"barrier/{epoch}")

    def wait_end(self, epoch: int) -> bool:
        """Wait for the end of the epoch; holds up all who use the same store object."""
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


def _joined(worker: str) -> str:
    return f"joined/{worker}"


def _text_of(fault: Fault) -> str:
    content = {"rank": fault.global_rank, "mode": fault.mode, "why": fault.why[:_MAX_WHY]}
    return json.dumps(content)


def _fault_of(text: str, epoch: int) -> Fault:
    found = json.loads(text)
    return Fault(found["rank"], epoch, FaultMode(found["mode"]), found["why"])
