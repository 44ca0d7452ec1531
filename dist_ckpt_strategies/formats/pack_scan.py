"""Scan a checkpoint of packs without loading it, and give the checks of all its bytes. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
from dist_ckpt_strategies.formats.locations import PACKS, Location
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint, place_of
from dist_ckpt_strategies.formats.pack_verify import WHOLE, pack_issues
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


def scan_packs(location: Location, options: Options) -> Scan:
    """What a checkpoint of packs holds, and what is wrong with it, by names, sizes and index.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is none.
        StoreAccessError, StoreUnreachableError, BucketNotFoundError: the store does not answer.
    """
    store = place_of(location)
    files, others = _files_at(store)
    marker, issues = checked_marker(store, PACKS.sharded_format)
    issues = [one for one in issues if one.problem is not Problem.MISSING_MARKER]
    try:
        checkpoint = PackCheckpoint(location, options)
        index = checkpoint.index
        packs = list(index.packs(range(index.num_packs)).values())
        held: dict[int, list[str]] = defaultdict(list)
        arrays = tuple(_arrays(checkpoint, packs, held))
        objects = tuple(_objects(index.objects(), packs))
        facts = index.facts
    except NO_ANSWER:
        raise
    except CheckpointError as error:
        issues.append(_bad_index(error, store))
        packs, arrays, objects, facts, checkpoint, held = [], (), (), {}, None, {}
    checks = [_check(store, pack, held.get(number, ())) for number, pack in enumerate(packs)]
    checks += _full_index_check(checkpoint)
    for check in checks:
        issues += compared(check, files)
    if checkpoint is not None and COMMON_NAME in files:
        checks.append(_common_check(store, checkpoint, files[COMMON_NAME] or 0))
    elif checkpoint is not None and index.common is not None:
        expected = "a copy of the common state in the packs, for Megatron-Core's own load"
        issues.append(Issue(Problem.MISSING_FILE, None, COMMON_NAME, expected, "nothing"))
    named = {check.name for check in checks} | {*_TOP_NAMES}
    stale = [
        StaleFile(StaleKind.PARTIAL, name, nbytes or 0)
        for name, nbytes in sorted(files.items())
        if checkpoint is not None and name not in named
    ]
    return Scan(
        root=location,
        backend=PACKS.sharded_format,
        marker=marker,
        common_nbytes=files.get(COMMON_NAME),
        arrays=arrays,
        objects=objects,
        stale_files=tuple(stale),
        issues=sorted_by_key(issues),
        num_files=len(files),
        nbytes=sum(nbytes or 0 for nbytes in files.values()),
        checks=lambda: iter(checks),
        num_threads=store.num_readers,
        facts=facts,
        others=others,
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
    checkpoint: PackCheckpoint, packs: list[PackRecord], held: dict[int, list[str]]
) -> Iterator[ScannedArray]:
    """Each array, with its blocks and the ranks that have written them.

    Adds it to ``held``, the keys by the number of the pack.
    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
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
                held[pack] += [key] if held[pack][-1:] != [key] else []
    for key, spec in specs.items():
        num_blocks, size = counts[key]
        yield ScannedArray(spec, num_blocks, size, tuple(sorted(writers[key])))


def _objects(objects: Iterable[StoredObject], packs: list[PackRecord]) -> Iterator[ScannedObject]:
    for (key, shape), some in groupby(objects, lambda found: (found.id.key, found.id.shape)):
        shards = list(some)
        nbytes = sum(found.stored.nbytes for found in shards)
        writers = sorted({packs[found.stored.pack].rank for found in shards})
        yield ScannedObject(key, shape, len(shards), len(shards), nbytes, tuple(writers))


def _check(store: Place, pack: PackRecord, keys: Sequence[str]) -> FileCheck:
    name, holds = file_of(pack.name), f", with blocks of {some_of(keys)}" if keys else ""

    def run() -> Iterator[Issue]:
        for issue in pack_issues(store, pack):
            is_of_all = issue.expected.startswith(WHOLE)
            yield replace(issue, expected=issue.expected + holds) if is_of_all else issue

    expected = f"{nbytes_text(pack.nbytes)}, written by rank {pack.rank}{holds}"
    return FileCheck(None, name, pack.nbytes, run, expected)


def _full_index_check(checkpoint: PackCheckpoint | None) -> list[FileCheck]:
    """Its size; its parts are compared with their digests whenever they are read."""
    if checkpoint is None:
        return []
    name, nbytes = full_index_of(checkpoint.index.save_id), checkpoint.index.nbytes
    return [FileCheck(None, name, nbytes, lambda: (), nbytes_text(nbytes))]


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

    return FileCheck(None, COMMON_NAME, nbytes, run)
