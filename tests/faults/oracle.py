"""Which checkpoints are whole, by what was done to them: it never asks the package.

A ledger is a value. What happens gives a new one; what a recovery may bring follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Tier(StrEnum):
    """Where a checkpoint is."""

    LOCAL = "local"
    GLOBAL = "global"


class Status(StrEnum):
    """What is known of a checkpoint, or of a file."""

    WHOLE = "whole"
    UNSURE = "unsure"
    """A load may bring it, if then to the bit, or refuse it."""

    BROKEN = "broken"


class Place(StrEnum):
    """What a byte of a local checkpoint's file is."""

    HEADER = "header"
    TENSOR = "tensor"
    PADDING = "padding"


@dataclass(frozen=True, slots=True, order=True)
class SaveKey:
    """A local save.

    Attributes:
        iteration: of the training.
        token: tells it from others of that iteration.
    """

    iteration: int
    token: str


@dataclass(frozen=True, slots=True, order=True)
class CopyKey:
    """A copy of a rank's part of a local save.

    Attributes:
        save: the save.
        owner: the rank whose part it is.
        holder: the rank that keeps it.
    """

    save: SaveKey
    owner: int
    holder: int


@dataclass(frozen=True, slots=True)
class CopyState:
    """What is known of a copy.

    Attributes:
        has_header: whether it still says what it is.
        content: whether its tensors are what was saved.
    """

    has_header: bool = True
    content: Status = Status.WHOLE


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """What a recovery brings.

    Attributes:
        iteration: of the training.
        tier: where it was.
    """

    iteration: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is known of all checkpoints.

    Attributes:
        num_ranks: parts of a local save.
        num_kept: local saves that are kept, the newest included.
        global_: by directory or URL, the iteration and the status.
        copies: of local shards, those that are there.
    """

    num_ranks: int
    num_kept: int
    global_: Mapping[str, tuple[int, Status]] = field(default_factory=dict)
    copies: Mapping[CopyKey, CopyState] = field(default_factory=dict)

    def with_global(self, name: str, iteration: int, status: Status) -> Ledger:
        """A global checkpoint is there."""
        return replace(self, global_={**self.global_, name: (iteration, status)})

    def without_global(self, names: Iterable[str]) -> Ledger:
        """These global checkpoints are gone."""
        gone = set(names)
        return replace(self, global_={n: s for n, s in self.global_.items() if n not in gone})

    def damaged_global(self, name: str, *, is_harmless: bool) -> Ledger:
        """A byte of it has changed; ``is_harmless``: one that a load need not look at."""
        iteration, status = self.global_[name]
        after = Status.UNSURE if is_harmless and status is not Status.BROKEN else None
        return self.with_global(name, iteration, after or Status.BROKEN)

    def with_copies(self, seen: Iterable[CopyKey]) -> Ledger:
        """These copies are there, and no others; those that are new are whole."""
        return replace(self, copies={key: self.copies.get(key, CopyState()) for key in seen})

    def without_node(self, holder: int) -> Ledger:
        """All that a rank keeps is gone."""
        kept = {key: state for key, state in self.copies.items() if key.holder != holder}
        return replace(self, copies=kept)

    def damaged_copy(self, key: CopyKey, place: Place) -> Ledger:
        """A byte of a copy has changed."""
        state = self.copies[key]
        match place:
            case Place.HEADER:
                after = CopyState(has_header=False, content=Status.BROKEN)
            case Place.TENSOR:
                after = replace(state, content=Status.BROKEN)
            case Place.PADDING:
                unsure = state.content is not Status.BROKEN
                after = replace(state, content=Status.UNSURE) if unsure else state
        return replace(self, copies={**self.copies, key: after})

    def local_status(self, save: SaveKey) -> Status:
        """Whether a rank can read each part of a local save."""
        return min(
            (self._part_status(save, owner) for owner in range(self.num_ranks)),
            key=_RANKING.__getitem__,
        )

    def local_saves(self) -> list[SaveKey]:
        """The saves of which something is there, the newest first."""
        return sorted({key.save for key in self.copies}, reverse=True)

    def is_listed(self, save: SaveKey) -> bool:
        """Whether each part has a copy that says what it is."""
        owners = {
            key.owner for key, state in self.copies.items() if key.save == save and state.has_header
        }
        return len(owners) == self.num_ranks

    def candidates(self) -> dict[Found, Status]:
        """What there is, each with the best status of all that have its iteration and tier."""
        found: dict[Found, Status] = {}
        local = [(s.iteration, Tier.LOCAL, self.local_status(s)) for s in self.local_saves()]
        global_ = [(i, Tier.GLOBAL, status) for i, status in self.global_.values()]
        for iteration, tier, status in (*local, *global_):
            key = Found(iteration, tier)
            found[key] = max(found.get(key, status), status, key=_RANKING.__getitem__)
        return found

    def newest_whole(self) -> Found | None:
        """What a recovery may not go back beyond; a local one comes before an equal global one."""
        whole = [found for found, s in self.candidates().items() if s is Status.WHOLE]
        return max(whole, key=_preference, default=None)

    def acceptable(self) -> set[Found]:
        """What an undisturbed recovery may bring."""
        floor = self.newest_whole()
        return {
            found
            for found, status in self.candidates().items()
            if status is not Status.BROKEN
            and (floor is None or _preference(found) >= _preference(floor))
        }

    def usable(self) -> set[Found]:
        """What a recovery may bring in which something else went wrong."""
        return {found for found, s in self.candidates().items() if s is not Status.BROKEN}

    def kept_copies(self, newest: SaveKey) -> set[CopyKey]:
        """Copies that have to be there once a local save is complete.

        Its own, and those of as many saves before it as are kept; those that nobody can list do
        not count, whatever their tensors.
        """
        earlier: dict[int, SaveKey] = {}
        for save in self.local_saves():
            if save.iteration < newest.iteration and self.is_listed(save):
                earlier.setdefault(save.iteration, save)
        kept = {newest, *list(earlier.values())[: self.num_kept - 1]}
        return {key for key in self.copies if key.save in kept}

    def _part_status(self, save: SaveKey, owner: int) -> Status:
        states = [
            state
            for key, state in self.copies.items()
            if key.save == save and key.owner == owner and state.has_header
        ]
        contents = [state.content for state in states]
        return max(contents, key=_RANKING.__getitem__, default=Status.BROKEN)


_RANKING = {Status.BROKEN: 0, Status.UNSURE: 1, Status.WHOLE: 2}


def _preference(found: Found) -> tuple[int, bool]:
    return found.iteration, found.tier is Tier.LOCAL
