"""Scan and verify a checkpoint without loading it. Loads no torch.

A scan reads names, sizes and metadata. In packs the index lists all files; of format ("zarr", 1)
see ``zarr2_scan``.
"""

from __future__ import annotations

import errno
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.core.blocks import BlockTable, merged
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    StorageError,
    some_of,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME, SAVES, Pointer, full_index_of
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
    NO_FILE,
    FileCheck,
    Issue,
    Problem,
    Scan,
    Scanned,
    StaleFile,
    StaleKind,
    checked_marker,
    compared,
    nbytes_text,
    sorted_by_key,
    unreadable,
)
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    Location,
    holds_checkpoints,
    holds_packs,
    place_of,
    refuse_format2,
    require_something,
)
from dist_ckpt_strategies.formats.pack import StoredObject
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint, pointer_at
from dist_ckpt_strategies.formats.pack_header import verify_pack
from dist_ckpt_strategies.formats.pack_write import FOLDER, PackRecord, file_of
from dist_ckpt_strategies.formats.zarr2_scan import scan_zarr
from dist_ckpt_strategies.storage.bucket import Bucket, Place
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    reason,
    require_directory,
)
from dist_ckpt_strategies.storage.folders import folders_below, read_folder

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator

_COPYING_S = 1.0
"""A save that has replaced the index writes ``common.pt`` next, within this as a rule."""

_FOLDERS = (FOLDER, SAVES)
_TOP_NAMES = (INDEX_NAME, COMMON_NAME, MARKER_NAME)
_STARTS = tuple(f"{name}/" for name in _FOLDERS)


def scan(place: Location, watch: Watch | None = None) -> Scan:
    """The contents and issues of a checkpoint, by names, sizes and metadata.

    Reads no array and no object; ``verify`` compares their bytes. A checkpoint of another sharded
    backend is counted, and not looked into. In format 1 ``watch`` is called with the directories
    done and known so far.

    Raises:
        CheckpointNotFoundError: it does not exist, or there is nothing of a checkpoint; says which
            ones it holds.
        IncompatibleVersionError: it is of format ("zarr", 2), or an object store holds something
            else than packs.
        StoreAccessError, StorageTimeoutError: the store does not answer.
    """
    if isinstance(place, Path):
        place = place.absolute()
        require_directory(place)
    if holds_packs(place):
        return _scan_packs(place)
    named = None
    with suppress(StorageError):
        named = refuse_format2(place)
    if isinstance(place, Bucket):
        names = place.names()
        if not any(name.startswith(f"{FOLDER}/") for name in names):
            raise _not_packs(place, names)
    elif named not in {None, PACKS.sharded_format} or not (place / FOLDER).is_dir():
        return scan_zarr(place, watch)
    return _scan_packs(place)  # of a save that has not ended, or without its index


def verify(
    scan: Scan, watch: Watch | None = None, *, comm: Communicator | None = None
) -> tuple[Issue, ...]:
    """The issues of a scan, and those of comparing every byte with its digest; sorted by key.

    Format 1 keeps checksums of objects and the common state alone, and no list of its arrays: their
    files are read, and only names and sizes are compared. Each thread takes a few MiB of memory, or
    those of the object that it looks at. ``watch`` is called with bytes.

    Collective if ``comm`` has several ranks: each reads its share of the files, and all return the
    same.

    Raises:
        StoreAccessError, StorageTimeoutError: an object store does not answer any more.
        CheckpointChangedError: another save has replaced it meanwhile.
        PlanError: the ranks see different files.
    """
    return sorted_by_key(run_checks(scan.issues, scan.checks, scan.num_threads, watch, comm))


def run_checks(
    issues: Sequence[Issue],
    checks: Iterable[FileCheck],
    num_threads: int,
    watch: Watch | None,
    comm: Communicator | None,
) -> list[Issue]:
    """The issues of a scan, then those of all checks but of files that have an issue already.

    Collective if ``comm`` has several ranks.
    """
    with_issue = {issue.path for issue in issues}
    left = [check for check in checks if check.name not in with_issue]
    ranks = Ranks(comm)
    results = ranks.share(
        left, lambda check: check.nbytes, _run, num_threads=num_threads, watch=watch
    )
    numbered = [(number, of_check) for number, of_check in results.items() if of_check]
    gathered = sorted(chain.from_iterable(ranks.gather(lambda: numbered)), key=itemgetter(0))
    return [*issues, *(issue for _, of_check in gathered for issue in of_check)]


def _run(check: FileCheck, count: Count) -> list[Issue]:
    try:
        issues = list(check.run())
    except (*NO_ANSWER, CheckpointChangedError):
        raise  # no other object would be read either
    except CheckpointError as error:
        issues = [unreadable(check.key, check.name, error.message)]
    except OSError as error:
        issues = [unreadable(check.key, check.name, reason(error))]
    count(check.nbytes)
    return issues


def _not_packs(bucket: Bucket, names: Sequence[str]) -> CheckpointError:
    """The error for a place in an object store that has no packs, but objects of these names."""
    if not names:
        require_something(bucket)
    ends = (f"/{MARKER_NAME}", f"/{INDEX_NAME}")
    if inner := sorted({n.partition("/")[0] for n in names if n[n.find("/") :] in ends}):
        text = f"{bucket} is no checkpoint: {holds_checkpoints(inner)}"
        return CheckpointNotFoundError(text, path=str(bucket))
    return IncompatibleVersionError(
        f"{bucket} holds objects, but no checkpoint of packs, the only format in object stores; "
        "check the URL"
    )


# Packs


def _scan_packs(location: Location, *, pause_s: float = _COPYING_S) -> Scan:
    """See ``scan``; by names, sizes and the index. If common.pt differs, again after a pause."""
    store, save = place_of(location), _save_at(location)
    files, others, unread = _files_at(store)
    marker, issues = checked_marker(store, PACKS.sharded_format)
    scan = Scan(
        root=location,
        backend=PACKS.sharded_format,
        marker=marker,
        files=files,
        num_threads=store.num_readers,
        issues=(*unread, *(one for one in issues if one.problem is not Problem.MISSING_MARKER)),
        others=others,
    )
    try:
        scan = _with_contents(scan, store, PackCheckpoint(location, Options()))
    except NO_ANSWER:
        raise
    except CheckpointError as error:
        scan = replace(scan, issues=(*scan.issues, _bad_index(error, store)))
    if scan.issues and _save_at(location) != save:  # another has replaced it meanwhile
        return _scan_packs(location)
    if pause_s and any(issue.path == COMMON_NAME for issue in scan.issues):
        time.sleep(pause_s)
        return _scan_packs(location, pause_s=0.0)
    return replace(scan, issues=sorted_by_key(scan.issues))


def _save_at(location: Location) -> Pointer | None:
    with suppress(CheckpointError):
        return pointer_at(location)
    return None


def _of_save(checkpoint: PackCheckpoint, run: Callable[[], Iterable[Issue]]) -> Sequence[Issue]:
    """The issues of a check; CheckpointChangedError if another save has replaced what it is of."""
    issues = checkpoint.save.read(lambda: list(run()))
    if issues:
        checkpoint.save.require_current()
    return issues


def _with_contents(scan: Scan, store: Place, checkpoint: PackCheckpoint) -> Scan:
    """The scan with what the index says, and whether that is there."""
    index, files = checkpoint.index, scan.files
    packs = index.packs()
    arrays, keys = _arrays(checkpoint, packs)
    name, nbytes = full_index_of(index.pointer.save_id), index.nbytes
    table, objects = merged(index.tables())[0], index.objects()
    in_pack: dict[int, list[StoredObject]] = defaultdict(list)
    for shard in objects:
        in_pack[shard[1].pack].append(shard)

    def listed(number: int) -> tuple[BlockTable, Sequence[StoredObject]]:
        return table.rows(np.flatnonzero(table.place[:, 0] == number)), in_pack[number]

    def run() -> Iterable[Issue]:
        try:
            checkpoint.find(checkpoint.keys())
        except CorruptCheckpointError as error:  # its parts do not fit together
            return (_bad_index(error, store),)
        return ()

    checks = [_pack_check(store, pack, keys[n], partial(listed, n)) for n, pack in packs.items()]
    checks.append(FileCheck(None, name, nbytes, nbytes_text(nbytes), run))
    if COMMON_NAME in files and index.common is not None:
        checks.append(_common_check(store, checkpoint, index.common.nbytes))
    unread = tuple(f"{one.path}/" for one in scan.issues if one.problem is Problem.UNREADABLE)
    known = [check for check in checks if not check.name.startswith(unread)]
    issues = [*scan.issues, *(issue for check in known for issue in compared(check, files))]
    lost = sorted({COMMON_NAME, MARKER_NAME} - files.keys()) if index.common is not None else ()
    copy = "a copy for Megatron-Core"
    issues += (Issue(Problem.MISSING_FILE, None, name, copy, NO_FILE) for name in lost)
    stale = files.keys() - {check.name for check in checks} - {*_TOP_NAMES}
    return replace(
        scan,
        arrays=arrays,
        objects=tuple(_objects(objects, packs)),
        stale_files=tuple(
            StaleFile(StaleKind.PARTIAL, name, files[name] or 0) for name in sorted(stale)
        ),
        issues=tuple(issues),
        checks=tuple(replace(c, run=partial(_of_save, checkpoint, c.run)) for c in checks),
        facts=index.facts,
    )


def _files_at(
    store: Place,
) -> tuple[dict[str, int | None], tuple[str, ...], Sequence[Issue]]:
    """The files of checkpoints of packs, with their sizes where a list says them, and others.

    Also the issues of folders that cannot be read.
    """
    if isinstance(store, Bucket):
        names = store.names()
        listed = {n: None for n in names if n in _TOP_NAMES or n.startswith(_STARTS)}
        others = sorted({n.partition("/")[0] for n in names if n not in listed})
        return {**listed}, tuple(others), ()
    root = Path(str(store))
    top = read_folder(root, "")
    files: dict[str, int | None] = {
        name: nbytes
        for name, nbytes in top.files.items()
        if name in _TOP_NAMES or name.startswith(PARTIAL_PREFIX)
    }
    unread: list[Issue] = []
    for folder in folders_below(root, [name for name in _FOLDERS if name in top.folders]):
        files |= {folder.path_of(name): nbytes for name, nbytes in folder.files.items()}
        unread += [unreadable(None, folder.key, folder.failure)] if folder.failure else []
    top_names = {*top.files, *top.folders, *top.links, *top.others}
    return files, tuple(sorted(top_names.difference(files, _FOLDERS, (LOCK_NAME,)))), unread


_NOT_READ = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
"""Errors that tell nothing of what a file holds."""


def _bad_index(error: CheckpointError, store: Place) -> Issue:
    name = (error.path or "").removeprefix(f"{store}/") or INDEX_NAME
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _NOT_READ:
        return unreadable(None, name, reason(cause))
    damage = error.message.removeprefix(f"{error.path} ").removeprefix("is damaged: ")
    return Issue(Problem.DAMAGED, None, name, "what the save wrote", damage)


def _arrays(
    checkpoint: PackCheckpoint, packs: Mapping[int, PackRecord]
) -> tuple[tuple[Scanned, ...], Mapping[int, list[str]]]:
    """Each array, with the ranks that have written it; the keys in each pack, by its number."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    keys: dict[int, list[str]] = defaultdict(list)
    writers: dict[str, set[int]] = defaultdict(set)
    specs: dict[str, ArraySpec] = {}
    for table in checkpoint.index.tables():
        nbytes = table.nbytes
        for n, (key, facts) in enumerate(zip(table.keys, table.facts, strict=True)):
            is_own = table.array == n
            chunk = tuple(max(1, size) for size in facts.shape)
            specs.setdefault(key, ArraySpec(key, facts.shape, DType(facts.dtype), chunk))
            counts[key][0] += int(is_own.sum())
            counts[key][1] += int(nbytes[is_own].sum())
            for pack in np.unique(table.place[is_own, 0]).tolist():
                writers[key].add(packs[pack].rank)
                keys[pack] += [key] if keys[pack][-1:] != [key] else []
    scanned = (
        Scanned(key, spec.shape, counts[key][0], counts[key][1], tuple(sorted(writers[key])), spec)
        for key, spec in specs.items()
    )
    return tuple(scanned), keys


def _objects(objects: Iterable[StoredObject], packs: Mapping[int, PackRecord]) -> Iterator[Scanned]:
    for (key, shape), of_object in groupby(objects, lambda found: (found[0].key, found[0].shape)):
        places = [where for _, where in of_object]
        nbytes = sum(where.nbytes for where in places)
        writers = sorted({packs[where.pack].rank for where in places})
        yield Scanned(key, shape, len(places), nbytes, tuple(writers))


def _pack_check(
    store: Place,
    pack: PackRecord,
    keys: Sequence[str],
    listed: Callable[[], tuple[BlockTable, Sequence[StoredObject]]],
) -> FileCheck:
    holds = f", with blocks of {some_of(keys)}" if keys else ""
    expected = f"{nbytes_text(pack.nbytes)}, written by rank {pack.rank}{holds}"
    run = partial(verify_pack, store, pack.name, pack, holds, listed)
    return FileCheck(None, file_of(pack.name), pack.nbytes, expected, run)


def _common_check(store: Place, checkpoint: PackCheckpoint, nbytes: int) -> FileCheck:
    """``common.pt``, which Megatron-Core's own load reads, is the common state in the packs."""
    expected = f"the common state in the packs, {nbytes_text(nbytes)}"

    def run() -> Iterator[Issue]:
        listed = checkpoint.common_content()
        if store.read(COMMON_NAME) != listed:
            time.sleep(_COPYING_S)
            if (content := store.read(COMMON_NAME)) != listed:
                differing = f"{nbytes_text(len(content))} that differ"
                yield Issue(Problem.DAMAGED, None, COMMON_NAME, expected, differing)

    return FileCheck(None, COMMON_NAME, nbytes, expected, run)
