"""Scan a ("zarr", 2) checkpoint, in a directory or an object store. Loads no torch.

``manifest_files`` gives every file that the manifest lists, with its size and the comparison of its
bytes with their digests. A scan compares their names, and sizes where a listing has them, with
those that are there; ``verify`` and loads with ``verify="full"`` compare the bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec, Shape
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.errors import CheckpointError, IncompleteCheckpointError, StorageError
from dist_ckpt_strategies.formats.chunks import chunk_name, digests_of, missing_chunk
from dist_ckpt_strategies.formats.issues import (
    NO_ANSWER,
    NO_FILE,
    FileCheck,
    Issue,
    Problem,
    SaveBegun,
    Scan,
    ScannedArray,
    ScannedObject,
    StaleFile,
    StaleKind,
    check_marker,
    compared,
    marker_or_issue,
    missing_common,
    require_no_inner,
    sorted_by_key,
)
from dist_ckpt_strategies.formats.locations import CheckpointMarker
from dist_ckpt_strategies.formats.manifest import (
    FOLDER_NAMES,
    INDEX_NAME,
    MANIFEST_NAME,
    SAVE_NAME,
    SCHEMA,
    ArrayRecord,
    ChunkRecord,
    FileDigest,
    Manifest,
    ManifestIndex,
    ObjectRecord,
    Span,
    digest_of,
)
from dist_ckpt_strategies.formats.zarr3 import (
    METADATA_NAME,
    array_directory,
    metadata_content,
)
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    folders_below,
    nbytes_text,
    read_folder,
    require_directory,
)
from dist_ckpt_strategies.storage.store import (
    Directory,
    Store,
    WrongSizeError,
    block_sizes,
)

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.storage.bucket import Bucket

FORMAT2 = ("zarr", 2)

_TOP_NAMES = (MARKER_NAME, COMMON_NAME)

_UNLISTED_NAMES = (MARKER_NAME, COMMON_NAME, SAVE_NAME, INDEX_NAME)
"""Files that belong to a checkpoint, though the manifest may not list them."""


def scan_format2(place: Path | Bucket) -> Scan | None:
    """What a place holds; None where it is not of format 2. Reads the manifest, and no data.

    Args:
        place: the directory, or the place in an object store; errors as for ``scan``.
    """
    if isinstance(place, Path):
        place = place.absolute()
        there = _files_of_directory(place)
    else:
        there = _files_of_bucket(place)
    if there is None:
        return None
    store, marker, files, others = there
    index, arrays, objects, issues = _read_manifest(store)
    common = None if index is None else index.common
    checks = partial(manifest_files, store, arrays, objects, common)
    of_files: list[Issue] = []
    listed = set(_UNLISTED_NAMES)
    chunks: dict[str, list[int]] = defaultdict(list)
    for check in checks():
        listed.add(check.name)
        of_files += compared(check, files)
        if check.name in files:
            nbytes = files[check.name]
            nbytes = files[check.name] = check.nbytes if nbytes is None else nbytes
            if check.key is not None and not check.name.endswith(METADATA_NAME):
                chunks[check.key].append(nbytes)
    if common is None and COMMON_NAME not in files:
        of_files.append(missing_common())
    if index is not None and not issues:
        of_files += _unexpected(files, listed, index)
    stale = (
        StaleFile(StaleKind.PARTIAL, name, nbytes or 0)
        for name, nbytes in sorted(files.items())
        if _is_stale(name)
    )
    of_files.sort(key=lambda issue: issue.path)
    return Scan(
        root=place,
        version=2,
        marker=marker if isinstance(marker, CheckpointMarker) else None,
        common_nbytes=files.get(COMMON_NAME),
        arrays=tuple(_scanned_array(record, chunks[record.array.key]) for record in arrays),
        objects=tuple(_grids(objects)),
        stale_files=tuple(stale),
        issues=sorted_by_key([*check_marker(marker, FORMAT2), *issues, *of_files]),
        num_files=len(files),
        nbytes=sum(nbytes or 0 for nbytes in files.values()),
        checks=checks,
        num_threads=store.num_readers,
        begun=read_begun(store),
        index=index,
        others=others,
    )


def _unexpected(
    files: dict[str, int | None], listed: set[str], index: ManifestIndex
) -> Iterator[Issue]:
    """An issue for each file that the manifest, all of which was read, does not list."""
    for segment in index.segments:
        listed.add(segment.name)
        if files.get(segment.name, 0) is None:
            files[segment.name] = segment.nbytes
    for name in sorted(files.keys() - listed):
        if not _is_stale(name):
            nbytes = files[name]
            expected = "no file that the manifest does not list"
            found = "an object" if nbytes is None else nbytes_text(nbytes)
            yield Issue(Problem.UNEXPECTED_FILE, None, name, expected, found)


def read_begun(store: Store) -> SaveBegun | None:
    """When and where the save to a place began; None where no file of a save says so."""
    try:
        fields = json.loads(store.read(SAVE_NAME)[:MAX_JSON_NBYTES])
        if fields["schema"] != SCHEMA:
            return None
        return SaveBegun(float(fields["time"]), str(fields["host"]))
    except NO_ANSWER:
        raise
    except (StorageError, ValueError, LookupError, TypeError):
        return None


_There = tuple[Store, CheckpointMarker | Issue, dict[str, int | None], tuple[str, ...]]
"""What gives the content of files; the marker, or what is wrong with it; the size of each of the
checkpoint's files by name, None where a listing has none; names beside them."""


def _files_of_directory(root: Path) -> _There | None:
    require_directory(root)
    top = read_folder(root, "")
    if top.failure:
        raise StorageError(f"{root} cannot be listed: {top.failure}", path=str(root))
    store = Directory(root)
    marker = marker_or_issue(store)
    with file_errors(None, root / MANIFEST_NAME):  # which may not be looked into
        is_known = any((root / name).is_file() for name in (SAVE_NAME, INDEX_NAME))
    if not is_known and not _is_format2(marker):
        return None
    files: dict[str, int | None] = {
        name: nbytes for name, nbytes in top.files.items() if name in _TOP_NAMES or _is_stale(name)
    }
    for folder in folders_below(root, [name for name in FOLDER_NAMES if name in top.folders]):
        files |= {folder.path_of(name): nbytes for name, nbytes in folder.files.items()}
    names = {*top.files, *top.folders, *top.links, *top.others}
    others = sorted(n for n in names.difference(files, FOLDER_NAMES) if not _is_stale(n))
    return store, marker, files, tuple(others)


def _files_of_bucket(bucket: Bucket) -> _There | None:
    """One list of all names below the URL: those of the last save, and what is beside it."""
    from dist_ckpt_strategies.formats.locations import (  # noqa: PLC0415
        current_place,
        require_something,
        visible_place,
    )

    names = bucket.names()
    if not names:
        require_something(bucket)
    place = visible_place(bucket)
    prefix = str(place).removeprefix(str(bucket)).removeprefix("/")
    inner = [n.removeprefix(f"{prefix}/") for n in names if n.startswith(prefix and f"{prefix}/")]
    is_current = str(place) == str(current_place(bucket))
    marker = marker_or_issue(place if is_current else bucket)
    if not {SAVE_NAME, INDEX_NAME} & set(inner) and not _is_format2(marker):
        ends = (f"/{MARKER_NAME}", f"/{SAVE_NAME}")
        inner = sorted({n.partition("/")[0] for n in names if n[n.find("/") :] in ends})
        require_no_inner(bucket, inner)
        return None
    mine = [name for name in inner if _is_of_checkpoint(name)]
    others = {name.partition("/")[0] for name in inner if not _is_of_checkpoint(name)}
    if prefix:
        beside = {name.partition("/")[0] for name in names}
        others |= beside.difference({prefix, MARKER_NAME})
    return place, marker, dict.fromkeys(mine), tuple(sorted(others))


def _is_format2(marker: CheckpointMarker | Issue) -> bool:
    return isinstance(marker, CheckpointMarker) and marker.sharded_format == FORMAT2


def _is_stale(name: str) -> bool:
    """Whether a file was being written, or removed, when a process was killed."""
    return any(part.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) for part in name.split("/"))


def _is_of_checkpoint(name: str) -> bool:
    top, slash, _ = name.partition("/")
    return name in _TOP_NAMES or _is_stale(name) or (bool(slash) and top in FOLDER_NAMES)


def _read_manifest(
    store: Store,
) -> tuple[ManifestIndex | None, list[ArrayRecord], list[ObjectRecord], list[Issue]]:
    """The manifest as far as it can be read, and what is missing or damaged.

    Returns:
        Its table of contents, if that can be read; the arrays and objects of the segments that can
        be read, sorted by key; the issues.

    Raises:
        IncompatibleVersionError: a later version of this package wrote it.
    """
    arrays: list[ArrayRecord] = []
    objects: list[ObjectRecord] = []
    issues: list[Issue] = []
    try:
        manifest = Manifest(store)
    except CheckpointError as error:
        if error.path is None:
            raise  # of a later version
        return None, [], [], [_bad_manifest(INDEX_NAME, error)]
    for segment in manifest.index.segments:
        try:
            of_segment = manifest.contents_of(segment)
        except CheckpointError as error:
            issues.append(_bad_manifest(segment.name, error))
        else:
            arrays += of_segment[0]
            objects += of_segment[1]
    return manifest.index, arrays, objects, issues


def _bad_manifest(name: str, error: CheckpointError) -> Issue:
    if isinstance(error, IncompleteCheckpointError):
        return Issue(Problem.MISSING_FILE, None, name, "a file of the manifest", NO_FILE)
    text = error.message.removeprefix(f"{error.path} ")
    return Issue(Problem.DAMAGED, None, name, "what the save wrote", text)


def _scanned_array(record: ArrayRecord, sizes: Sequence[int]) -> ScannedArray:
    writers = tuple(sorted({chunk.writer for chunk in record.chunks.values()}))
    return ScannedArray(record.array, len(sizes), sum(sizes), writers)


def _grids(objects: Sequence[ObjectRecord]) -> Iterator[ScannedObject]:
    by_key: dict[str, list[ObjectRecord]] = {}
    for record in objects:
        by_key.setdefault(record.id.key, []).append(record)
    for key, records in by_key.items():
        nbytes = sum(record.span.nbytes for record in records if record.span is not None)
        writers = tuple(sorted({record.writer for record in records}))
        shape = records[0].id.shape
        yield ScannedObject(key, shape, len(records), len(records), nbytes, writers)


def manifest_files(
    store: Store,
    arrays: Iterable[ArrayRecord],
    objects: Iterable[ObjectRecord],
    common: FileDigest | None,
) -> Iterator[FileCheck]:
    """Every file that the manifest lists, and the comparison of its bytes with their digests.

    Args:
        store: the checkpoint.
        arrays: of the manifest.
        objects: of the manifest.
        common: the common state's file, if it is listed.
    """
    for record in arrays:
        yield from _files_of_array(store, record)
    yield from _packs(store, objects)
    if common is not None:
        yield _whole_file(store, None, COMMON_NAME, common, "the state that all ranks share")


def _files_of_array(store: Store, record: ArrayRecord) -> Iterator[FileCheck]:
    """The file that describes an array to other readers, then those of its chunks."""
    array, content = record.array, metadata_content(record.array)
    listed = FileDigest(len(content), digest_of(content))
    expected = "what other readers need to know"
    name = f"{array_directory(array.key)}/{METADATA_NAME}"
    yield _whole_file(store, array.key, name, listed, expected)
    grid = InnerGrid.of(array, (0,) * len(array.shape))
    for index, chunk in record.chunks.items():
        nbytes = (len(chunk.digests) - 1) * grid.stored_nbytes + grid.index_nbytes
        name, run = chunk_name(array, index), partial(check_chunk, store, array, index, chunk)
        expected = f"{nbytes_text(nbytes)} {_where(index, chunk)}"
        yield FileCheck(array.key, name, nbytes, run, expected)


def _packs(store: Store, objects: Iterable[ObjectRecord]) -> Iterator[FileCheck]:
    """The files that hold objects."""
    packs: dict[str, list[tuple[ObjectRecord, Span]]] = {}
    for record in objects:
        if record.span is not None:
            packs.setdefault(record.span.name, []).append((record, record.span))
    for name, records in packs.items():
        records.sort(key=lambda record: record[1].byte_offset)
        nbytes = sum(span.nbytes for _, span in records)
        run = partial(_check_pack, store, name, records)
        yield FileCheck(None, name, nbytes, run, f"{nbytes_text(nbytes)} of objects")


def _whole_file(
    store: Store, key: str | None, name: str, listed: FileDigest, what: str
) -> FileCheck:
    """A file with one digest."""
    expected = f"{what}, {nbytes_text(listed.nbytes)}"

    def run() -> Iterator[Issue]:
        content = store.read(name)
        if (len(content), digest_of(content)) != (listed.nbytes, listed.digest):
            text = f"{expected} with digest {listed.digest}"
            found = f"{len(content)} with {digest_of(content)}"
            yield Issue(Problem.DAMAGED, key, name, text, found)

    return FileCheck(key, name, listed.nbytes, run, expected)


def _where(index: Shape, record: ChunkRecord) -> str:
    return f"(chunk {index}, written by rank {record.writer})"


def check_chunk(store: Store, array: ArraySpec, index: Shape, record: ChunkRecord) -> list[Issue]:
    """Every inner chunk of a chunk's file whose digest differs, and the index where its does.

    Raises:
        IncompleteCheckpointError: the file is missing.
        StorageError: it cannot be read.
    """
    grid, name = InnerGrid.of(array, index), chunk_name(array, index)
    where = _where(index, record)
    step = max(1, store.block_nbytes // grid.stored_nbytes) * grid.stored_nbytes
    sizes = block_sizes(grid.data_nbytes, step)
    digests: list[int] = []
    try:
        blocks = store.read_blocks(name, [*sizes[:-1], sizes[-1] + grid.index_nbytes])
        for nbytes, block in zip(sizes, blocks, strict=True):
            content = np.frombuffer(block, np.uint8)
            digests += digests_of(content[:nbytes].reshape(-1, grid.stored_nbytes))
            if len(digests) == grid.num_chunks:
                digests += digests_of(content[None, nbytes:])
    except IncompleteCheckpointError:
        raise missing_chunk(array, store.path(name)) from None
    except WrongSizeError as error:
        expected = f"{nbytes_text(error.expected)} {where}"
        return [Issue(Problem.WRONG_SIZE, array.key, name, expected, error.found)]
    return [
        Issue(
            Problem.DAMAGED,
            array.key,
            name,
            f"{'its index' if number == grid.num_chunks else f'inner chunk {number}'} with "
            f"digest {record.digests[number]:016x} {where}",
            f"{digest:016x}",
        )
        for number, digest in enumerate(digests)
        if digest != record.digests[number]
    ]


def _check_pack(
    store: Store, name: str, records: Sequence[tuple[ObjectRecord, Span]]
) -> Iterator[Issue]:
    """Compare the size of a file of objects, then each object in it: one follows the other."""
    try:
        blocks = store.read_blocks(name, [span.nbytes for _, span in records])
        for (record, span), content in zip(records, blocks, strict=True):
            if digest_of(content) != span.digest:
                lead = f"{span.nbytes} bytes from byte {span.byte_offset} with digest {span.digest}"
                expected = f"{lead} (written by rank {record.writer})"
                text = f"{len(content)} with {digest_of(content)}"
                yield Issue(Problem.DAMAGED, record.id.unique_key, name, expected, text)
    except WrongSizeError as error:
        expected = f"{nbytes_text(error.expected)} of objects"
        yield Issue(Problem.WRONG_SIZE, None, name, expected, error.found)
