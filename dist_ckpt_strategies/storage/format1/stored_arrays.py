"""The chunk files of an array, by their names and sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.findings import (
    MAX_LISTED,
    NO_FILE,
    Finding,
    Problem,
    grid_indices,
    grid_text,
    nbytes_text,
)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array whose metadata could be read.

    Attributes:
        array: its metadata.
        num_chunks: chunk files of its grid that are there.
        file_nbytes: their bytes.
    """

    array: ArraySpec
    num_chunks: int
    file_nbytes: int


def chunk_index(array: ArraySpec, name: str) -> Extent | None:
    """The chunk that a file of that name holds; None where the array has no such chunk."""
    parts = name.split(array.separator)
    if not all(map(str.isdecimal, parts)) or not name.isascii():
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
    expected, chunk_nbytes = _content(array), array.chunk_nbytes
    wrong = {
        n for n, size in chunks.items() if (size != chunk_nbytes if array.is_raw else not size)
    }
    for name in sorted(wrong, key=partial(_order, array)):
        path, found = f"{array.key}/{name}", nbytes_text(chunks[name])
        yield Finding(Problem.WRONG_CHUNK_SIZE, array.key, path, expected, found)
    yield from _check_missing(array, chunks.keys())
    for name in sorted(strangers):
        path, grid = f"{array.key}/{name}", f"chunks of the grid {grid_text(array.grid)} only"
        yield Finding(Problem.UNEXPECTED_CHUNK, array.key, path, grid, "a file outside of it")


def _check_missing(array: ArraySpec, present: Collection[str]) -> Iterator[Finding]:
    names = map(array.chunk_name, grid_indices(array.grid))
    missing = (name for name in names if name not in present)
    num_missing = array.num_chunks - len(present)
    expected = _content(array)
    for name in islice(missing, min(num_missing, MAX_LISTED)):
        path = f"{array.key}/{name}"
        yield Finding(Problem.MISSING_CHUNK, array.key, path, expected, NO_FILE)
    if num_missing > MAX_LISTED:
        found = f"{len(present)}; {num_missing - MAX_LISTED} more are missing than listed here"
        chunks = f"{array.num_chunks} chunk files"
        yield Finding(Problem.MISSING_CHUNK, array.key, array.key, chunks, found)


def _order(array: ArraySpec, name: str) -> Extent:
    return chunk_index(array, name) or ()


def _content(array: ArraySpec) -> str:
    return nbytes_text(array.chunk_nbytes) if array.is_raw else "a compressed chunk"
