"""What ``prune`` sees of packs in a place, and how it removes them. Rank-local; imports no torch.

A pack or full index that the index does not name is of a save that was killed, or that still runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME, SAVES, full_index_of
from dist_ckpt_strategies.formats.pack import LENGTH
from dist_ckpt_strategies.formats.pack_commit import MARKER, current_save
from dist_ckpt_strategies.formats.pack_header import header_nbytes
from dist_ckpt_strategies.formats.pack_write import FOLDER, file_of
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    Directory,
    file_errors,
)
from dist_ckpt_strategies.storage.folders import folders_below

_OURS = re.compile(
    rf"{FOLDER}/[0-9a-f]{{2}}/[0-9a-f]{{16}}\.safetensors|{SAVES}/[^/]+/{INDEX_NAME}"
    rf"|{re.escape(PARTIAL_PREFIX)}[0-9a-f]{{32}}"
)


@dataclass(frozen=True, slots=True)
class FoundPacks:
    """Packs and indexes in a place.

    Attributes:
        is_complete: whether the index is whole and every file that it names is there; None where
            there is no index and no marker, which no save has been committed for.
        named: the files that the index names, the index first; the index alone if it is damaged.
        nbytes: of these.
        changed_s: when the save was committed; in a bucket, when it began.
        stale: files that the index does not name, sorted; none where that cannot be told.
        stale_nbytes: of these; None in a bucket.
        stale_changed_s: when the newest of them was written; in a bucket, when its save began.
    """

    is_complete: bool | None
    named: tuple[str, ...]
    nbytes: int | None
    changed_s: float
    stale: tuple[str, ...] = ()
    stale_nbytes: int | None = None
    stale_changed_s: float = 0.0


def look_at_packs(store: Place) -> FoundPacks | None:
    """What there is of packs; None where there is nothing. Changes nothing."""
    listed = _listed(store)
    if not listed:
        return None
    begun_s = listed.pop(INDEX_NAME, (None, None))[1]
    sizes: dict[str, int] = {}
    is_complete: bool | None = None
    if begun_s is None and _says_packs(store):
        is_complete = False
    elif begun_s is not None:
        with suppress(CorruptCheckpointError, IncompleteCheckpointError):
            sizes = _named_sizes(store)
        is_complete = bool(sizes) and all(
            listed.get(name, (-1, 0.0))[0] in {None, nbytes} for name, nbytes in sizes.items()
        )
    named = (INDEX_NAME, *sizes) if begun_s is not None else ()
    if is_complete is False and not sizes:
        return FoundPacks(is_complete, named, None, begun_s or 0.0)
    stale = tuple(sorted(listed.keys() - sizes.keys()))
    known = [listed[name][0] for name in stale]
    return FoundPacks(
        is_complete,
        named,
        sum(sizes.values()),
        begun_s or 0.0,
        stale,
        None if None in known else sum(filter(None, known)),
        max((_written_s(store, name, listed[name][1]) for name in stale), default=0.0),
    )


def remove_stale(store: Place, older_than_s: float) -> tuple[str, ...]:
    """Remove files of killed saves, unless one of them is younger; what was removed.

    Under the lock that every commit takes: what a save commits meanwhile is named, and stays.
    """
    with store.locked():
        found = look_at_packs(store)
        if found is None or time.time() - found.stale_changed_s < older_than_s:
            return ()
        store.delete(found.stale)
        return found.stale


def remove_packs(store: Place, older_than_s: float) -> None:
    """Remove the save that counts: the index first, then the common state and what it names.

    Where the index is lost or damaged, all packs go, unless one of them is younger.
    """
    with store.locked():
        found = look_at_packs(store)
        if found is None:
            return
        store.delete(found.named[:1])
        store.delete([COMMON_NAME, *found.named[1:]])
        if not found.named[1:]:
            left = _listed(store)
            newest_s = max((_written_s(store, n, at) for n, (_, at) in left.items()), default=0.0)
            if time.time() - newest_s >= older_than_s:
                store.delete(sorted(left))


def remove_lock(directory: Directory) -> None:
    """Remove the file of the lock if no packs are left; a save that waits for it has some there."""
    if not _listed(directory):
        directory.delete([LOCK_NAME])


def _says_packs(store: Place) -> bool:
    with suppress(IncompleteCheckpointError, ValueError):
        return bool(json.loads(store.read(MARKER_NAME)) == MARKER)
    return False


def _listed(store: Place) -> dict[str, tuple[int | None, float | None]]:
    """Files of packs: size in bytes and time of change, as far as the place tells."""
    if not isinstance(store, Directory):
        names: Iterable[str] = (*store.names(f"{FOLDER}/"), *store.names(f"{SAVES}/"))
        found: dict[str, tuple[int | None, float | None]] = {
            name: (None, None) for name in names if _OURS.fullmatch(name)
        }
        return found | ({INDEX_NAME: (None, 0.0)} if store.has(INDEX_NAME) else {})
    inner: list[str] = []
    found = {}
    for folder in folders_below(store.root, [FOLDER, SAVES]):
        if folder.failure:
            raise StorageError(f"{folder.key}: {folder.failure}", path=folder.key)
        inner += map(folder.path_of, folder.files)
    for name in (*inner, *(store.names(PARTIAL_PREFIX) if inner else ()), INDEX_NAME):
        path = store.root / name
        with file_errors(None, path), suppress(FileNotFoundError):
            status = path.lstat()
            if (name == INDEX_NAME or _OURS.fullmatch(name)) and path.is_file():
                found[name] = status.st_size, status.st_mtime
    return found


def _named_sizes(store: Place) -> dict[str, int]:
    """The files that the index names, the full index first, and their sizes."""
    current = current_save(store)
    if current is None:
        return {}
    pointer, index = current
    packs = index.packs(range(index.num_packs)).values()
    nbytes = pointer.byte_offset + pointer.nbytes + LENGTH.size
    return {full_index_of(pointer.save_id): nbytes} | {file_of(p.name): p.nbytes for p in packs}


def _written_s(store: Place, name: str, changed_s: float | None) -> float:
    """When a file was written; in a bucket when its save began, and now where it does not say."""
    if changed_s is not None:
        return changed_s
    save_id = name.split("/")[1] if name.startswith(f"{SAVES}/") else ""
    with suppress(CorruptCheckpointError, IncompleteCheckpointError, ValueError, LookupError):
        if name.startswith(f"{FOLDER}/"):
            start = store.read(name, 0, LENGTH.size)
            content = store.read(name, LENGTH.size, header_nbytes(start, name) - LENGTH.size)
            save_id = json.loads(content)["__metadata__"]["save"]
        return int(save_id.partition("-")[0]) / 1e6
    return time.time()
