"""Scan a checkpoint of packs without loading it, and give the checks of all its bytes. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.errors import CheckpointError, some_of
from dist_ckpt_strategies.formats.index import INDEX_NAME, SAVES, StoredObject, full_index_of
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
    NO_FILE,
    FileCheck,
    Issue,
    Problem,
    Scan,
    ScannedArray,
    ScannedObject,
    StaleFile,
    StaleKind,
    checked_marker,
    compared,
    sorted_by_key,
)
from dist_ckpt_strategies.formats.locations import PACKS, Location, place_of
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.formats.pack_verify import WHOLE, verify_pack
from dist_ckpt_strategies.formats.pack_write import FOLDER, PackRecord, file_of
from dist_ckpt_strategies.storage.bucket import Bucket, Place
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    nbytes_text,
)
from dist_ckpt_strategies.storage.folders import folders_below, read_folder

_FOLDERS = (FOLDER, SAVES)
_TOP_NAMES = (INDEX_NAME, COMMON_NAME, MARKER_NAME)


def scan_packs(location: Location) -> Scan:
    """What a checkpoint of packs holds, and what is wrong with it, by names, sizes and index.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is none.
        StoreAccessError, StorageTimeoutError: the store does not answer.
    """
    store = place_of(location)
    files, others = _files_at(store)
    marker, issues = checked_marker(store, PACKS.sharded_format)
    scan = Scan(
        root=location,
        backend=PACKS.sharded_format,
        marker=marker,
        files=files,
        num_threads=store.num_readers,
        issues=tuple(one for one in issues if one.problem is not Problem.MISSING_MARKER),
        others=others,
    )
    try:
        scan = _with_contents(scan, store, PackCheckpoint(location, Options()))
    except NO_ANSWER:
        raise
    except CheckpointError as error:
        scan = replace(scan, issues=(*scan.issues, _bad_index(error, store)))
    return replace(scan, issues=sorted_by_key(scan.issues))


def _with_contents(scan: Scan, store: Place, checkpoint: PackCheckpoint) -> Scan:
    """The scan with what the index says, and whether that is there."""
    index, files = checkpoint.index, scan.files
    packs = index.packs(range(index.num_packs))
    arrays, keys = _arrays(checkpoint, packs)
    name, nbytes = full_index_of(index.save_id), index.nbytes
    checks = [_pack_check(store, pack, keys[number]) for number, pack in packs.items()]
    # Its parts are compared with their digests whenever they are read.
    checks.append(FileCheck(None, name, nbytes, nbytes_text(nbytes), lambda: ()))
    issues = [*scan.issues, *(issue for check in checks for issue in compared(check, files))]
    if COMMON_NAME in files:
        checks.append(_common_check(store, checkpoint, files[COMMON_NAME] or 0))
    lost = sorted({COMMON_NAME, MARKER_NAME} - files.keys()) if index.common is not None else ()
    copy = "a copy for Megatron-Core"
    issues += (Issue(Problem.MISSING_FILE, None, name, copy, NO_FILE) for name in lost)
    stale = files.keys() - {check.name for check in checks} - {*_TOP_NAMES}
    return replace(
        scan,
        arrays=arrays,
        objects=tuple(_objects(index.objects(), packs)),
        stale_files=tuple(
            StaleFile(StaleKind.PARTIAL, name, files[name] or 0) for name in sorted(stale)
        ),
        issues=tuple(issues),
        checks=tuple(checks),
        facts=index.facts,
    )


def _files_at(store: Place) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """The files of checkpoints of packs, with their sizes where a list says them, and others."""
    if isinstance(store, Bucket):
        names = store.names()
        own = {n: None for n in names if n in _TOP_NAMES or n.startswith(_STARTS)}
        return {**own}, tuple(sorted({n.partition("/")[0] for n in names if n not in own}))
    root = Path(str(store))
    top = read_folder(root, "")
    files: dict[str, int | None] = {
        name: nbytes
        for name, nbytes in top.files.items()
        if name in _TOP_NAMES or name.startswith(PARTIAL_PREFIX)
    }
    for folder in folders_below(root, [name for name in _FOLDERS if name in top.folders]):
        files |= {folder.path_of(name): nbytes for name, nbytes in folder.files.items()}
    found = {*top.files, *top.folders, *top.links, *top.others}
    return files, tuple(sorted(found.difference(files, _FOLDERS, (LOCK_NAME,))))


_STARTS = tuple(f"{name}/" for name in _FOLDERS)


def _bad_index(error: CheckpointError, store: Place) -> Issue:
    name = (error.path or "").removeprefix(f"{store}/") or INDEX_NAME
    what = error.message.removeprefix(f"{error.path} ").removeprefix("is damaged: ")
    return Issue(Problem.DAMAGED, None, name, "what the save wrote", what)


def _arrays(
    checkpoint: PackCheckpoint, packs: Mapping[int, PackRecord]
) -> tuple[tuple[ScannedArray, ...], Mapping[int, list[str]]]:
    """Each array, with the ranks that have written it; the keys in each pack, by its number."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    keys: dict[int, list[str]] = defaultdict(list)
    writers: dict[str, set[int]] = defaultdict(set)
    specs: dict[str, ArraySpec] = {}
    for table in checkpoint.index.tables():
        sizes = np.array([DType(facts.dtype).itemsize for facts in table.facts], np.int64)
        nbytes = table.extent.prod(axis=1) * sizes[table.array] if len(table) else sizes[:0]
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
        ScannedArray(spec, counts[key][0], counts[key][1], tuple(sorted(writers[key])))
        for key, spec in specs.items()
    )
    return tuple(scanned), keys


def _objects(
    objects: Iterable[StoredObject], packs: Mapping[int, PackRecord]
) -> Iterator[ScannedObject]:
    for (key, shape), some in groupby(objects, lambda found: (found.id.key, found.id.shape)):
        shards = list(some)
        nbytes = sum(found.stored.nbytes for found in shards)
        writers = sorted({packs[found.stored.pack].rank for found in shards})
        yield ScannedObject(key, shape, len(shards), len(shards), nbytes, tuple(writers))


def _pack_check(store: Place, pack: PackRecord, keys: Sequence[str]) -> FileCheck:
    holds = f", with blocks of {some_of(keys)}" if keys else ""

    def run() -> Iterator[Issue]:
        for issue in verify_pack(store, pack.name, pack):
            is_of_all = issue.expected.startswith(WHOLE)
            yield replace(issue, expected=issue.expected + holds) if is_of_all else issue

    expected = f"{nbytes_text(pack.nbytes)}, written by rank {pack.rank}{holds}"
    return FileCheck(None, file_of(pack.name), pack.nbytes, expected, run)


def _common_check(store: Place, checkpoint: PackCheckpoint, nbytes: int) -> FileCheck:
    """``common.pt``, which Megatron-Core's own load reads, is the common state in the packs."""

    def run() -> Iterator[Issue]:
        if checkpoint.index.common is None:
            return
        content, listed = store.read(COMMON_NAME), checkpoint.common_content()
        if content != listed:
            expected = f"the common state in the packs, {nbytes_text(len(listed))}"
            found = f"{nbytes_text(len(content))} that differ"
            yield Issue(Problem.DAMAGED, None, COMMON_NAME, expected, found)

    return FileCheck(None, COMMON_NAME, nbytes, "", run)
