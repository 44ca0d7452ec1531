"""What can be wrong with a checkpoint, and how it shows in the names and sizes of its files."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.object import UNKNOWN, ObjectId
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.object_files import OBJECT_SUFFIX

MAX_LISTED = 1000
"""Missing files of one key that have a finding each; one more finding stands for the others."""

NO_FILE = "no file"


class Problem(StrEnum):
    """The kinds of damage; the values are part of the command's JSON."""

    MISSING_MARKER = "missing_marker"
    BAD_MARKER = "bad_marker"
    UNKNOWN_BACKEND = "unknown_backend"
    MISSING_COMMON = "missing_common"
    MISSING_METADATA = "missing_metadata"
    BAD_METADATA = "bad_metadata"
    MISSING_CHUNK = "missing_chunk"
    WRONG_CHUNK_SIZE = "wrong_chunk_size"
    UNEXPECTED_CHUNK = "unexpected_chunk"
    MISSING_OBJECT = "missing_object"
    UNEXPECTED_OBJECT = "unexpected_object"
    DAMAGED_ARCHIVE = "damaged_archive"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        problem: which kind.
        key: the array or object at fault; None for a file of the whole checkpoint.
        path: the file or directory at fault, relative to the checkpoint, ``/`` between parts.
        expected: what should be there.
        found: what is there instead.
    """

    problem: Problem
    key: str | None
    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        """One line: where, expected, found."""
        return f"{self.path}: expected {self.expected}, found {self.found}"


def chunk_index(array: ArraySpec, name: str) -> Extent | None:
    """The chunk that a file of that name holds; None where the array has no such chunk."""
    parts = name.split(array.separator)
    if any(not part.isascii() or not part.isdecimal() for part in parts):
        return None
    index = tuple(map(int, parts)) if array.shape else ()
    fits = len(index) == len(array.shape) and all(map(int.__lt__, index, array.grid))
    return index if fits and array.chunk_name(index) == name else None


def check_chunks(
    array: ArraySpec, chunks: Mapping[str, int], strangers: Collection[str]
) -> Iterator[Finding]:
    """Findings about the chunk files of one array.

    Args:
        array: what the array's metadata says.
        chunks: size in bytes of the files of its chunks, by name below the array's directory.
        strangers: names there that look like those of chunks, but of none in the grid.
    """
    expected = _content(array)
    for name, size in chunks.items():
        if size != array.chunk_nbytes if array.is_raw else size == 0:
            path, found = f"{array.key}/{name}", f"{size} bytes"
            yield Finding(Problem.WRONG_CHUNK_SIZE, array.key, path, expected, found)
    yield from _check_missing(array, chunks.keys())
    for name in sorted(strangers):
        path, grid = f"{array.key}/{name}", f"only chunks of the grid {_text(array.grid)}"
        yield Finding(Problem.UNEXPECTED_CHUNK, array.key, path, grid, "one that is not in it")


def _check_missing(array: ArraySpec, present: Collection[str]) -> Iterator[Finding]:
    names = (name for name in _chunk_names(array) if name not in present)
    num_missing = array.num_chunks - len(present)
    expected = _content(array)
    for name in islice(names, min(num_missing, MAX_LISTED)):
        path = f"{array.key}/{name}"
        yield Finding(Problem.MISSING_CHUNK, array.key, path, expected, NO_FILE)
    if num_missing > MAX_LISTED:
        yield Finding(
            Problem.MISSING_CHUNK,
            array.key,
            array.key,
            f"{array.num_chunks} chunk files",
            f"{len(present)}; {num_missing - MAX_LISTED} more are missing than are listed",
        )


def _chunk_names(array: ArraySpec) -> Iterator[str]:
    """File names in C order, one at a time: a damaged shape may call for any number of them."""
    return map(array.chunk_name, _indices(array.grid))


def _content(array: ArraySpec) -> str:
    return f"{array.chunk_nbytes} bytes" if array.is_raw else "a compressed chunk"


def check_shards(key: str, shape: Extent, found: Mapping[Extent, ObjectId]) -> Iterator[Finding]:
    """Findings about the files of one sharded object.

    Args:
        key: the object's.
        shape: of its grid, in shards.
        found: by offset, the shards whose files are there, as their names state them.
    """
    is_older = any(object_id.shape[-1] == UNKNOWN for object_id in found.values())
    inside = {offset for offset in found if all(map(int.__lt__, offset, shape))}
    missing = (offset for offset in _indices(shape) if offset not in inside)
    num_missing = math.prod(shape) - len(inside)
    for offset in islice(missing, min(num_missing, MAX_LISTED)):
        stated = (*shape[:-1], UNKNOWN) if is_older else shape
        path = shard_path(ObjectId(key, offset, stated))
        expected = f"one of {math.prod(shape)} shards"
        yield Finding(Problem.MISSING_OBJECT, key, path, expected, NO_FILE)
    if num_missing > MAX_LISTED:
        yield Finding(
            Problem.MISSING_OBJECT,
            key,
            key,
            f"{math.prod(shape)} shards",
            f"{len(inside)}; {num_missing - MAX_LISTED} more are missing than are listed",
        )
    for offset in sorted(found.keys() - inside):
        path, grid = shard_path(found[offset]), f"only shards of the grid {_text(shape)}"
        yield Finding(Problem.UNEXPECTED_OBJECT, key, path, grid, "one that is not in it")


def shard_path(object_id: ObjectId) -> str:
    """The file of a shard, relative to the checkpoint; an UNKNOWN number is not in its name."""
    is_older = object_id.shape[-1] == UNKNOWN
    return (object_id.older_key if is_older else object_id.unique_key) + OBJECT_SUFFIX


def _indices(grid: Extent) -> Iterator[Extent]:
    """Every index of a grid in C order, without holding the grid in memory."""
    for number in range(math.prod(grid)):
        index, rest = [], number
        for size in reversed(grid):
            rest, position = divmod(rest, size)
            index.append(position)
        yield tuple(reversed(index))


def _text(extent: Extent) -> str:
    return " x ".join(map(str, extent)) or "of a scalar"
