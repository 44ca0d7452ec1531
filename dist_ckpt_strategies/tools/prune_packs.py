"""Packs in a place, for ``prune``: finding and removing them. Rank-local; imports no torch.

A pack or full index that the index does not name is of a save that was killed, or that still runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.index import INDEX_NAME, SAVES, full_index_of
from dist_ckpt_strategies.formats.locations import PACKS, marker_of
from dist_ckpt_strategies.formats.pack import LENGTH
from dist_ckpt_strategies.formats.pack_commit import current_save
from dist_ckpt_strategies.formats.pack_header import header_nbytes
from dist_ckpt_strategies.formats.pack_write import FOLDER, file_of
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    PARTIAL_PREFIX,
    Directory,
    file_errors,
)
from dist_ckpt_strategies.storage.folders import files_below

_OURS = re.compile(
    rf"{FOLDER}/[0-9a-f]{{2}}/[0-9a-f]{{16}}\.safetensors|{SAVES}/[^/]+/{INDEX_NAME}"
    rf"|{re.escape(PARTIAL_PREFIX)}[0-9a-f]{{32}}"
)


@dataclass(frozen=True, slots=True)
class FoundPacks:
    """Packs and indexes in a place.

    Attributes:
        listed: size in bytes and time of change of each file, as far as the place tells.
        named: the files that the index names, and their sizes; none if it is lost or damaged.
        is_committed: whether there is an index, or a marker that says so.
    """

    listed: Mapping[str, tuple[int | None, float | None]]
    named: Mapping[str, int]
    is_committed: bool

    @property
    def is_complete(self) -> bool:
        """Whether the index is whole, and every file that it names is there."""
        sizes = ((self.listed.get(name, (-1, 0.0))[0], n) for name, n in self.named.items())
        return bool(self.named) and all(size in {None, nbytes} for size, nbytes in sizes)

    @property
    def committed_s(self) -> float:
        """When the index was written; 0 where the place does not tell."""
        return self.listed.get(INDEX_NAME, (0, 0.0))[1] or 0.0

    @property
    def stale(self) -> tuple[str, ...]:
        """Files that the index does not name, sorted; none where that cannot be told."""
        if self.is_committed and not self.named:
            return ()
        return tuple(sorted(self.listed.keys() - self.named.keys() - {INDEX_NAME}))

    @property
    def stale_nbytes(self) -> int | None:
        """Bytes of these, where the place tells."""
        sizes = [self.listed[name][0] for name in self.stale]
        return None if None in sizes else sum(filter(None, sizes))


def look_at_packs(store: Place) -> FoundPacks:
    """The packs and indexes in a place. Changes nothing."""
    listed, named = _listed(store), {}
    if INDEX_NAME in listed:
        with suppress(CorruptCheckpointError, IncompleteCheckpointError):
            named = _named_sizes(store)
    is_committed = INDEX_NAME in listed or (bool(listed) and marker_of(store) == PACKS)
    return FoundPacks(listed, named, is_committed)


def remove_stale(store: Place, older_than_s: float) -> tuple[str, ...]:
    """Remove files of killed saves, unless one of them is younger; what was removed.

    Under the lock that every commit takes: what a save commits meanwhile is named, and stays.
    """
    with store.locked():
        packs = look_at_packs(store)
        if time.time() - written_s(store, packs, packs.stale) < older_than_s:
            return ()
        store.delete(packs.stale)
        return packs.stale


def remove_packs(store: Place, older_than_s: float) -> None:
    """Remove the save that counts: the index first, then the common state and what it names.

    Where the index is lost or damaged, all packs go, unless one of them is younger.
    """
    with store.locked():
        packs = look_at_packs(store)
        store.delete([INDEX_NAME])
        store.delete([COMMON_NAME, *packs.named])
        left = sorted(packs.listed.keys() - {INDEX_NAME})
        if not packs.named and time.time() - written_s(store, packs, left) >= older_than_s:
            store.delete(left)


def remove_lock(directory: Directory) -> None:
    """Remove the file of the lock if no packs are left; a save that waits for it has some there."""
    if not _listed(directory):
        directory.delete([LOCK_NAME])


def _listed(store: Place) -> Mapping[str, tuple[int | None, float | None]]:
    """Files of packs: size in bytes and time of change, as far as the place tells."""
    names = [*files_below(store, FOLDER), *files_below(store, SAVES)]
    if not isinstance(store, Directory):
        index = [INDEX_NAME] if store.has(INDEX_NAME) else []
        return dict.fromkeys((*filter(_OURS.fullmatch, names), *index), (None, None))
    names += store.names(PARTIAL_PREFIX) if names else ()
    sizes: dict[str, tuple[int | None, float | None]] = {}
    for name in (*filter(_OURS.fullmatch, names), INDEX_NAME):
        path = store.root / name
        with file_errors(None, path), suppress(FileNotFoundError):
            if path.is_file():
                sizes[name] = path.lstat().st_size, path.lstat().st_mtime
    return sizes


def _named_sizes(store: Place) -> dict[str, int]:
    """The files that the index names, the full index first, and their sizes."""
    index = current_save(store)
    if index is None:
        return {}
    packs = {file_of(pack.name): pack.nbytes for pack in index.packs().values()}
    return {full_index_of(index.pointer.save_id): index.nbytes} | packs


def written_s(store: Place, packs: FoundPacks, names: Iterable[str]) -> float:
    """When the newest of these files was written; 0 if there are none.

    In a bucket that is when its save began, and now where a file does not say that.
    """
    return max((packs.listed[name][1] or _begun_s(store, name) for name in names), default=0.0)


def _begun_s(store: Place, name: str) -> float:
    save_id = name.split("/")[1] if name.startswith(f"{SAVES}/") else ""
    with suppress(CorruptCheckpointError, IncompleteCheckpointError, ValueError, LookupError):
        if name.startswith(f"{FOLDER}/"):
            start = store.read(name, 0, LENGTH.size)
            content = store.read(name, LENGTH.size, header_nbytes(start, name) - LENGTH.size)
            save_id = json.loads(content)["__metadata__"]["save"]
        return int(save_id.partition("-")[0]) / 1e6
    return time.time()
