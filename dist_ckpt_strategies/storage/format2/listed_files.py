"""What names and sizes of files show, compared with what the manifest lists. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.inner_grid import InnerGrid
from dist_ckpt_strategies.spec.manifest import ArrayRecord, ManifestIndex, ObjectRecord
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME, MARKER_NAME
from dist_ckpt_strategies.storage.findings import NO_FILE, Finding, Problem, nbytes_text
from dist_ckpt_strategies.storage.format2.checks import pack_ends
from dist_ckpt_strategies.storage.format2.files import is_remains
from dist_ckpt_strategies.storage.format2.layout import (
    METADATA_NAME,
    array_directory,
    metadata_content,
)
from dist_ckpt_strategies.storage.format2.manifest import INDEX_NAME, SAVE_NAME
from dist_ckpt_strategies.storage.format2.readable_manifest import ReadableManifest


def sized_files(
    files: Mapping[str, int | None], found: ReadableManifest, names: Mapping[str, Sequence[str]]
) -> Mapping[str, int | None]:
    """The files; those that are listed have the listed size, where their own is not known."""
    if None not in files.values():
        return files
    listed: dict[str, int] = dict(pack_ends(found.objects))
    for record in found.arrays:
        listed |= zip(names[record.array.key], _sizes_of(record), strict=True)
    if found.index is not None:
        listed |= {part.name: part.nbytes for part in found.index.parts}
        if found.index.common is not None:
            listed[COMMON_NAME] = found.index.common.nbytes
    return {n: listed.get(n) if nbytes is None else nbytes for n, nbytes in files.items()}


def _sizes_of(record: ArrayRecord) -> Iterator[int]:
    """Sizes of the files of ``names_of``, as they have to be."""
    yield len(metadata_content(record.array))
    stored_nbytes, index_nbytes = _sizes(record.array)
    for chunk in record.chunks.values():
        yield (chunk.num_digests - 1) * stored_nbytes + index_nbytes


def names_of(record: ArrayRecord) -> Iterator[str]:
    """The files of an array: its metadata, then its chunks in the order of their records."""
    directory = array_directory(record.array.key)
    yield f"{directory}/{METADATA_NAME}"
    for index in record.chunks:
        yield f"{directory}/{'.'.join(['c', *map(str, index)])}"


def check_files(
    found: ReadableManifest, names: Mapping[str, Sequence[str]], files: Mapping[str, int | None]
) -> Iterator[Finding]:
    """What names and sizes show, compared with what can be read of the manifest."""
    yield from _check_common(found.index, files)
    for record in found.arrays:
        yield from _check_array(record, names[record.array.key], files)
    yield from _check_packs(found.objects, files)
    if found.is_whole:
        yield from _check_unexpected(found, names, files)


def _check_array(
    record: ArrayRecord, names: Sequence[str], files: Mapping[str, int | None]
) -> Iterator[Finding]:
    array = record.array
    if names[0] not in files:
        expected = "what other readers need to know"
        yield Finding(Problem.MISSING_METADATA, array.key, names[0], expected, NO_FILE)
    sizes = islice(_sizes_of(record), 1, None)
    for (index, chunk), name, nbytes in zip(record.chunks.items(), names[1:], sizes, strict=True):
        if files.get(name) == nbytes:
            continue
        is_there = name in files
        yield Finding(
            Problem.WRONG_CHUNK_SIZE if is_there else Problem.MISSING_CHUNK,
            array.key,
            name,
            f"{nbytes_text(nbytes)} (chunk {index}, written by rank {chunk.writer})",
            _size_text(files[name]) if is_there else NO_FILE,
        )


def _size_text(nbytes: int | None) -> str:
    return "an object" if nbytes is None else nbytes_text(nbytes)


def _sizes(array: ArraySpec) -> tuple[int, int]:
    """Bytes of one inner chunk, and of the index of each chunk's file.

    Each inner chunk has a digest, and so has the index: the manifest was refused otherwise.
    """
    if not array.num_chunks:
        return 0, 0
    grid = InnerGrid.of(array, (0,) * len(array.shape))
    return grid.stored_nbytes, grid.index_nbytes


def _check_packs(
    objects: Sequence[ObjectRecord], files: Mapping[str, int | None]
) -> Iterator[Finding]:
    for name, end in pack_ends(objects).items():
        if files.get(name) != end:
            found = _size_text(files[name]) if name in files else NO_FILE
            problem = Problem.WRONG_FILE_SIZE if name in files else Problem.MISSING_OBJECT
            yield Finding(problem, None, name, f"{nbytes_text(end)} of objects", found)


def _check_common(
    index: ManifestIndex | None, files: Mapping[str, int | None]
) -> Iterator[Finding]:
    listed = None if index is None else index.common
    if COMMON_NAME not in files:
        expected = "the state that all ranks share"
        yield Finding(Problem.MISSING_COMMON, None, COMMON_NAME, expected, NO_FILE)
    elif listed is not None and files[COMMON_NAME] != listed.nbytes:
        found = _size_text(files[COMMON_NAME])
        expected = nbytes_text(listed.nbytes)
        yield Finding(Problem.DAMAGED_COMMON, None, COMMON_NAME, expected, found)


def _check_unexpected(
    found: ReadableManifest, names: Mapping[str, Sequence[str]], files: Mapping[str, int | None]
) -> Iterator[Finding]:
    assert found.index is not None  # noqa: S101 - the manifest is whole
    listed = {MARKER_NAME, COMMON_NAME, SAVE_NAME, INDEX_NAME}
    listed.update(entry.name for entry in found.index.parts)
    listed.update(record.span.name for record in found.objects if record.span is not None)
    for record in found.arrays:
        listed.update(names[record.array.key])
    for name, nbytes in files.items():
        if name not in listed and not is_remains(name):
            expected = "no file that the manifest does not list"
            yield Finding(Problem.UNEXPECTED_FILE, None, name, expected, _size_text(nbytes))
