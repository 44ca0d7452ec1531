"""Which checkpoints are whole, by what was done to them: it never asks the package.

A ledger is a value. What happens gives a new one; what a recovery may bring follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

NUM_RANKS = 4


class Tier(StrEnum):
    GLOBAL = "global"
    LOCAL = "local"


class Status(IntEnum):
    """What is known of a global checkpoint."""

    BROKEN = 0
    UNSURE = 1  # a load may bring it, if then to the bit, or refuse it
    WHOLE = 2


class Place(StrEnum):
    """What a byte of a local checkpoint's file is."""

    HEADER = "header"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True, order=True)
class SaveKey:
    """A local save; the token tells it from others of that iteration."""

    iteration: int
    token: str


@dataclass(frozen=True, slots=True, order=True)
class CopyKey:
    """The copy that one rank holds of the part that another saved."""

    save: SaveKey
    owner: int
    holder: int


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """What a recovery brings; a local checkpoint comes before a global one of its iteration."""

    iteration: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is known of all checkpoints."""

    num_kept: int  # local saves that are kept, the newest included
    # by directory or URL, the iteration and the status.
    global_: Mapping[str, tuple[int, Status]] = field(default_factory=dict)
    # those that are there, and the worst place where each is damaged.
    copies: Mapping[CopyKey, Place | None] = field(default_factory=dict)

    def with_global(self, name: str, iteration: int, status: Status) -> Ledger:
        return replace(self, global_={**self.global_, name: (iteration, status)})

    def without_global(self, names: Iterable[str]) -> Ledger:
        gone = set(names)
        return replace(self, global_={n: s for n, s in self.global_.items() if n not in gone})

    def with_copies(self, seen: Iterable[CopyKey]) -> Ledger:
        """These copies are there, and no others; those that are new are whole."""
        return replace(self, copies={key: self.copies.get(key) for key in seen})

    def without_node(self, holder: int) -> Ledger:
        """All that a rank keeps is gone."""
        return self.with_copies(key for key in self.copies if key.holder != holder)

    def damaged_copy(self, key: CopyKey, place: Place) -> Ledger:
        """A byte of a copy has changed."""
        if self.copies[key] is Place.HEADER:
            return self
        return replace(self, copies={**self.copies, key: place})

    def local_saves(self) -> list[SaveKey]:
        """The saves of which something is there, the newest first."""
        return sorted({key.save for key in self.copies}, reverse=True)

    def is_whole(self, save: SaveKey) -> bool:
        """Whether each part has a copy without damage."""
        return self._has_all(save, {None})

    def is_listed(self, save: SaveKey) -> bool:
        """Whether each part has a copy that says what it is."""
        return self._has_all(save, {None, Place.TENSOR})

    def _has_all(self, save: SaveKey, damages: set[Place | None]) -> bool:
        found = {k.owner for k, d in self.copies.items() if k.save == save and d in damages}
        return len(found) == NUM_RANKS

    def candidates(self) -> dict[Found, Status]:
        """What there is, each with the best status of all that have its iteration and tier."""
        found: dict[Found, Status] = {}
        for save in self.local_saves():
            key = Found(save.iteration, Tier.LOCAL)
            status = Status.WHOLE if self.is_whole(save) else Status.BROKEN
            found[key] = max(status, found.get(key, status))
        for iteration, status in self.global_.values():
            key = Found(iteration, Tier.GLOBAL)
            found[key] = max(status, found.get(key, status))
        return found

    def newest_whole(self) -> Found | None:
        """What a recovery may not go back beyond."""
        whole = [found for found, s in self.candidates().items() if s is Status.WHOLE]
        return max(whole, default=None)

    def usable(self) -> set[Found]:
        """What a recovery may bring in which something else went wrong."""
        return {found for found, s in self.candidates().items() if s is not Status.BROKEN}

    def acceptable(self) -> set[Found]:
        """What an undisturbed recovery may bring."""
        newest = self.newest_whole()
        return {found for found in self.usable() if newest is None or found >= newest}

    def kept_copies(self, newest: SaveKey) -> set[CopyKey]:
        """Copies that have to be there once a local save is complete.

        Its own, and those of as many saves before it as are kept; those that no rank can list do
        not count, whatever their tensors.
        """
        earlier: dict[int, SaveKey] = {}
        for save in self.local_saves():
            if save.iteration < newest.iteration and self.is_listed(save):
                earlier.setdefault(save.iteration, save)
        kept = {newest, *list(earlier.values())[: self.num_kept - 1]}
        return {key for key in self.copies if key.save in kept}
