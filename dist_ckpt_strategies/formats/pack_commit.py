"""Make packs the content of a checkpoint, in one step: the replacement of ``index``.

Packs and full index have new names, and are never written again. What the replaced index names is
deleted afterwards, and nothing else: neither a file that no index names nor that of another save.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from dist_ckpt_strategies.core.blocks import merged
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    StorageTimeoutError,
    some_of,
)
from dist_ckpt_strategies.formats.commit import require_own_place
from dist_ckpt_strategies.formats.index import (
    INDEX_NAME,
    SAVES,
    FullIndex,
    NewSave,
    PackSummary,
    Pointer,
    array_segments,
    build_full_index,
    full_index_of,
)
from dist_ckpt_strategies.formats.locations import PACKS, holds_dcp, marker_of
from dist_ckpt_strategies.formats.pack_write import FOLDER, PackRecord, delete_files, file_of
from dist_ckpt_strategies.storage.bucket import Bucket, Place, content_of
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    MARKER_NAME,
    Directory,
    set_aside,
)
from dist_ckpt_strategies.storage.io_pool import Job, Transfer, raise_if_cancelled

logger = logging.getLogger(__name__)

_OF_TORCH_DIST = ".metadata"  # makes its files a checkpoint
_INTEGRITY = "integrity.json"  # Megatron-Core's digests, written after a save of its own
_OWN_NAMES = (INDEX_NAME, SAVES, FOLDER, COMMON_NAME, MARKER_NAME, LOCK_NAME)

NOT_COMMITTED = (
    "; nothing was committed; save again, from all ranks to one directory on a file system that "
    "they share"
)
_NUM_THREADS = 16


def read_pointer(store: Place) -> Pointer | None:
    """The content of ``index``; None if there is none. CorruptCheckpointError if it is damaged."""
    try:
        content = content_of(store, INDEX_NAME)
    except StorageError:
        if os.path.isdir(store.path(INDEX_NAME)):  # noqa: PTH112 - never raises; a key in Zarr
            return None
        raise
    return None if content is None else Pointer.from_bytes(content, store.path(INDEX_NAME))


def open_full_index(store: Place, pointer: Pointer) -> FullIndex:
    """The full index that a pointer names.

    Raises:
        IncompleteCheckpointError: it is missing.
        CorruptCheckpointError: it is damaged.
    """
    name = full_index_of(pointer.save_id)
    try:
        return FullIndex(pointer, partial(store.read, name), store.path(name))
    except CorruptCheckpointError as error:
        text = f"{error.message}; or {store.path(INDEX_NAME)} is damaged, which says so"
        raise CorruptCheckpointError(text, path=error.path) from error
    except IncompleteCheckpointError as error:
        raise IncompleteCheckpointError(
            f"{error.message}; {store.path(INDEX_NAME)} names it, and one of the two is damaged: "
            "dist-ckpt rebuild-index makes both anew from the packs",
            path=error.path,
        ) from error


def new_save_id(store: Place) -> str:
    """An id for a save: larger than that of the save that is there, whatever clocks say."""
    last = 0
    with suppress(CorruptCheckpointError):
        pointer = read_pointer(store)
        number = pointer.save_id.partition("-")[0] if pointer else ""
        last = int(number) if number.isdecimal() else 0
    return f"{max(last + 1, time.time_ns() // 1000):017d}-{secrets.token_hex(4)}"


def commit(
    store: Place,
    save: NewSave,
    require: Callable[[], None] = require_own_place,
    *,
    deletes_replaced: bool = True,
) -> StorageError | None:
    """Make a save the content of a place. One rank calls it, on the thread that may be given up.

    An error means that the place holds what it held before, unless it is a StorageTimeoutError:
    the save may be committed then, or the last call still be carried out.

    ``require`` raises if it must not be committed, by default if this node is out of the job. What
    the replaced index alone names is deleted if ``deletes_replaced``.

    Returns:
        Why Megatron-Core's copies could not be written, although the save is committed.

    Raises:
        StorageError: a pack is gone, a file cannot be written, or a later save was committed.
    """
    with store.locked():
        others = [_OF_TORCH_DIST] if isinstance(store, Directory) else []
        replaced = [*_files_replaced(store, save), *others] if deletes_replaced else []
        is_over_another = save.marker is not None and warn_of_another_format(store)
        require()
        require_packs(store, save.packs, NOT_COMMITTED)
        name, (full_index, pointer) = full_index_of(save.save_id), build_full_index(save)
        try:
            store.write_pieces(name, [[np.frombuffer(full_index, np.uint8)]])
            raise_if_cancelled()
            if not store.has_bytes(name, len(full_index)):
                text = f"{store.path(name)} is gone right after it was written; save again"
                raise IncompleteCheckpointError(text, path=store.path(name))
            if save.marker is None:
                set_other_format_aside(store)
            store.write(INDEX_NAME, pointer.to_bytes())
        except StorageError as error:
            raise_if_cancelled()
            if not _is_named(store, pointer, error):
                delete_files(store, [name])
                raise
            logger.exception("%s: the new index is there, but may not be durable", store)
            replaced = []
        raise_if_cancelled()
        failure = _write_copies(store, save, marker_first=is_over_another)
    kept = {file_of(pack.name) for pack in save.packs}  # where only the index is new
    if isinstance(store, Directory):
        replaced.append(_INTEGRITY)
    delete_files(store, [name for name in replaced if name not in kept])
    return failure


def _write_copies(store: Place, save: NewSave, *, marker_first: bool) -> StorageError | None:
    """Write what Megatron-Core reads; the error where that fails.

    A marker of another format must not stand beside the new common state: then ours comes first.
    """
    copies = [(COMMON_NAME, save.common), (MARKER_NAME, save.marker)]
    try:
        for file, content in reversed(copies) if marker_first else copies:
            if content is not None:
                store.write(file, content)
    except StorageError as error:
        raise_if_cancelled()
        return error
    return None


def warn_of_another_format(store: Place) -> bool:
    """Whether a checkpoint of another format counts here, or would; logs what stays of it."""
    with suppress(StorageError):
        if marker_of(store) in {None, PACKS} and not holds_dcp(store):
            return False
        stays = {name.partition("/")[0] for name in store.names()} - {
            *_OWN_NAMES,
            _OF_TORCH_DIST,
            _INTEGRITY,
        }
        logger.warning(
            "%s: a checkpoint of another format is replaced; its files stay until you remove them:"
            " %s",
            store,
            some_of(sorted(stays)) or "none",
        )
        return True
    return False


def _is_named(store: Place, pointer: Pointer, error: StorageError) -> bool:
    """Whether ``index`` names a save although it could not be written, for that error."""
    try:
        return read_pointer(store) == pointer
    except CheckpointError:
        text = f"whether the save is committed cannot be told: {error.message}"
        raise StorageTimeoutError(text, path=error.path) from error


def set_other_format_aside(store: Place) -> None:
    """Make a checkpoint of another format count as incomplete: its common state is replaced.

    Megatron-Core writes the new marker after all else.
    """
    if isinstance(store, Directory) and warn_of_another_format(store):
        set_aside(store.root, MARKER_NAME, ".metadata")


def _files_replaced(store: Place, new: NewSave) -> list[str]:
    """The files of the save that is there; none if its index is damaged.

    First the full index, without which it counts no more: in a bucket ``index`` may name it once
    more, by a request that is carried out late.

    Raises a StorageError if that save began after the new one. An index that was rebuilt of the new
    one's packs is none.
    """
    try:
        pointer = read_pointer(store)
        if pointer is None:
            return []
        index = open_full_index(store, pointer)
        files = [file_of(pack.name) for pack in index.packs().values()]
    except (CorruptCheckpointError, IncompleteCheckpointError) as error:
        logger.warning("%s: files of the save that is replaced stay: %s", store, error)
        return []
    is_later = pointer.save_id > new.save_id
    if is_later and not {file_of(pack.name) for pack in new.packs}.issubset(files):
        raise StorageError(
            f"{store}: another save to it started before this one ended, and was committed; "
            "nothing became visible; save again from one job at a time",
            path=str(store),
        )
    return [full_index_of(pointer.save_id), *files]


def require_packs(store: Place, packs: Iterable[PackRecord], why: str = "") -> None:
    """Raise an IncompleteCheckpointError unless all are there, as far as sizes tell."""
    require_files([(store, file_of(p.name), p.nbytes, p.rank) for p in packs], why)


def require_files(files: Sequence[tuple[Place, str, int | None, int]], why: str) -> None:
    """The same for files, each by place, name, size if that is known, and rank that wrote it."""
    missing: list[tuple[int, str, str]] = []

    def look(store: Place, name: str, nbytes: int | None, rank: int) -> None:
        if not (store.has(name) if nbytes is None else store.has_bytes(name, nbytes)):
            than = "" if nbytes is None else f" than {nbytes} bytes"
            missing.append((rank, store.path(name), than))

    jobs = [Job("", file[0].path(file[1]), partial(look, *file)) for file in files]
    Transfer(jobs, _NUM_THREADS).wait()
    for rank, path, than in sorted(missing)[:1]:
        text = f"{path}, which rank {rank} has written, is gone or has another size{than}{why}"
        raise IncompleteCheckpointError(text, path=path)


def current_save(store: Place) -> FullIndex | None:
    """The index of the save that a place holds; None where there is no ``index``.

    In a bucket the request that replaced ``index`` may be carried out late, and name a save that is
    gone: then the whole save with the largest id counts.

    Raises:
        CorruptCheckpointError: the index is damaged.
        IncompleteCheckpointError: the save that it names is gone.
    """
    pointer = read_pointer(store)
    if pointer is None:
        return None
    try:
        return open_full_index(store, pointer)
    except IncompleteCheckpointError:
        if read_pointer(store) != pointer:  # another save has just replaced it
            return current_save(store)
        if not isinstance(store, Bucket):
            raise
        names = {name.split("/")[1] for name in store.names(f"{SAVES}/")}
        for save_id in sorted(names, reverse=True):
            with suppress(StorageError, ValueError):
                name = full_index_of(save_id)
                pointer = Pointer.of(save_id, store.read(name), store.path(name))
                return open_full_index(store, pointer)
        raise


def remove_keys(store: Place, key_prefix: str) -> None:
    """Remove the arrays and objects whose key starts with a prefix. One rank calls it.

    A new index no longer names them. Their bytes stay in the packs, until the checkpoint is
    converted.

    Raises:
        IncompleteCheckpointError: there is no index.
    """
    index = current_save(store)
    if index is None:
        path = store.path(INDEX_NAME)
        raise IncompleteCheckpointError(f"{store} holds no packs: {path} is missing", path=path)
    kept, nbytes = [], 0
    for table in index.tables():
        goes = np.array([key.startswith(key_prefix) for key in table.keys], bool)[table.array]
        nbytes += int(table.nbytes[goes].sum())
        kept.append(table.rows(np.flatnonzero(~goes)))
    objects = index.objects()
    stay = tuple(stored for stored in objects if not stored[0].key.startswith(key_prefix))
    nbytes += sum(where.nbytes for name, where in objects if name.key.startswith(key_prefix))
    facts = {name: index.facts[name] for name in index.facts.keys() - {"save_id", "version"}}
    summary = PackSummary(tuple(index.packs().values()), stay, index.common)
    commit(store, NewSave(new_save_id(store), array_segments(merged(kept)[0]), [summary], facts))
    logger.warning(
        "%s: %d bytes of %s* stay in the packs; dist-ckpt convert leaves them out",
        store,
        nbytes,
        key_prefix,
    )
