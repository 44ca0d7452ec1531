"""What an event does: to a rank, to the disk, to the server, or to what is stored."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.damage import choose_copies, flip_copy, flip_global, full
from tests.chaos.local_files import local_copies
from tests.chaos.oracle import Ledger, Standing
from tests.chaos.schedule import Event, Kind, Store
from tests.chaos.sites import DiskSite, ObjectServer, Site
from tests.chaos.traps import Act, Trap

MAX_NAP_S = 0.6
"""Of a rank that goes on in time."""

_MAX_DELAY_S = 0.25
_MAX_OUTAGE_S = 0.6
_MAX_LIMIT_NBYTES = 24_000
_MAX_LEFT_NBYTES = 300_000
_ACTS = {
    Kind.KILL: Act.KILL,
    Kind.HANG: Act.STOP,
    Kind.WAKE: Act.STOP,
    Kind.PAUSE: Act.STOP,
    Kind.FAIL: Act.FAIL,
    Kind.LIMIT: Act.LIMIT,
}


def trap_of(event: Event | None, rank: int, *, can_fill: bool) -> Trap | None:
    """What a rank does to itself. Where a disk cannot be filled, nobody may write anything."""
    if event is not None and event.kind is Kind.FULL and not can_fill:
        return Trap(Act.LIMIT, 0)
    if event is None or rank != event.victim or event.kind not in _ACTS:
        return None
    act = _ACTS[event.kind]
    is_timed = event.is_timed and act in {Act.KILL, Act.STOP}
    return Trap(
        act,
        event.call,
        event.share * _MAX_DELAY_S if is_timed else None,
        is_certain=act in {Act.KILL, Act.STOP},
        limit_nbytes=int(event.share * _MAX_LIMIT_NBYTES),
    )


@dataclass(frozen=True, slots=True)
class Strikes:
    """What events do from outside of the ranks.

    Attributes:
        root: holds the directories of the nodes, and of the global checkpoints.
        server: the object store, if there is one.
        can_fill: whether ``root`` is on a small disk of its own.
    """

    root: Path
    server: ObjectServer | None
    can_fill: bool

    @property
    def disk(self) -> DiskSite:
        """The global checkpoints on the disk."""
        return DiskSite(self.root / "global")

    def sites(self) -> list[Site]:
        """All places of global checkpoints."""
        return [self.disk, *([self.server.site] if self.server else [])]

    def site(self, event: Event) -> Site:
        """Where the global checkpoints of an event go."""
        if event.store is Store.DISK:
            return self.disk
        assert self.server is not None
        return self.server.site

    @contextmanager
    def from_outside(self, event: Event | None) -> Iterator[None]:
        """Within the block, what the ranks do not do to themselves."""
        if event is not None and event.kind is Kind.FULL and self.can_fill:
            # Half of the times nothing is left.
            with full(self.root, max(0, int((event.share - 0.5) * 2 * _MAX_LEFT_NBYTES))):
                yield
        elif event is not None and event.kind in {Kind.RESTART, Kind.EMPTIED}:
            with self._outage(event):
                yield
        elif event is not None and event.kind is Kind.LOSE_NODE:
            delay_s = event.share * _MAX_DELAY_S
            timer = threading.Timer(delay_s, shutil.rmtree, [self._node(event), True])
            timer.start()
            yield
            timer.join()
        else:
            yield

    def damaged(self, event: Event, ledger: Ledger) -> Ledger | None:
        """Change what is stored; the ledger then, None if there was nothing to change."""
        deeds: dict[Kind, Callable[[Event, Ledger], Ledger | None]] = {
            Kind.LOSE_NODE: self._lose_node,
            Kind.LOSE_GLOBAL: self._lose_global,
            Kind.FLIP_GLOBAL: self._flip_global,
            Kind.FLIP_LOCAL: self._flip_local,
        }
        return deeds[event.kind](event, ledger)

    @contextmanager
    def _outage(self, event: Event) -> Iterator[None]:
        assert self.server is not None
        is_emptied = event.kind is Kind.EMPTIED
        delay_s, length_s = event.share * _MAX_DELAY_S, (1 - event.share) * _MAX_OUTAGE_S
        outage = self.server.outage(delay_s, length_s, is_emptied=is_emptied)
        try:
            yield
        finally:
            outage.join()
            if is_emptied:
                self.server.site.make()

    def _lose_node(self, event: Event, ledger: Ledger) -> Ledger | None:
        node = self._node(event)
        if not node.exists():
            return None
        shutil.rmtree(node)
        return ledger.without_node(event.victim)

    def _node(self, event: Event) -> Path:
        return self.root / f"node{event.victim}"

    def _lose_global(self, event: Event, ledger: Ledger) -> Ledger | None:
        name = self._newest_global(event, ledger)
        if name is None:
            return None
        self.site(event).remove(name)
        return ledger.without_global([name])

    def _flip_global(self, event: Event, ledger: Ledger) -> Ledger | None:
        name = self._newest_global(event, ledger)
        if name is None:
            return None
        is_harmless = flip_global(self.site(event), name, event.chance(), event.change)
        return ledger.damaged_global(name, is_harmless=is_harmless)

    def _flip_local(self, event: Event, ledger: Ledger) -> Ledger | None:
        found = local_copies(self.root)
        good = {
            key: path
            for key, path in found.items()
            if ledger.copies[key].content is not Standing.BROKEN
        }
        if not good:
            return None
        chance = event.chance()
        for key in choose_copies(good, chance, both=event.call % 2 == 0):
            place = flip_copy(good[key], chance, event.change)
            ledger = ledger.damaged_copy(key, place)
        return ledger

    def _newest_global(self, event: Event, ledger: Ledger) -> str | None:
        """The newest one in the event's store that nothing has been done to."""
        address = self.site(event).address
        found = {
            name: iteration
            for name, (iteration, standing) in ledger.global_.items()
            if name.startswith(address) and standing is Standing.WHOLE
        }
        return max(found, key=found.__getitem__, default=None)
