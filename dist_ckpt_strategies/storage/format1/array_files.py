"""What every engine does around the data of arrays: write metadata, flush the names of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.base import HostArray, Transfer
from dist_ckpt_strategies.storage.disk.files import sync_path
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.transfers import Job, run_pooled


def begin_creates(
    layout: Zarr2Layout, arrays: Sequence[ArraySpec], num_threads: int, *, is_flushed: bool
) -> Transfer:
    """Write the metadata of each array."""
    create = partial(layout.create, is_flushed=is_flushed)
    jobs = (
        Job(array.key, layout.metadata_path(array.key), partial(create, array)) for array in arrays
    )
    return run_pooled(jobs, num_threads)


def begin_syncs(layout: Zarr2Layout, arrays: Sequence[ArraySpec], num_threads: int) -> Transfer:
    """Flush the directory of each array and those above, each once."""
    paths = layout.directories(array.key for array in arrays)
    jobs = (Job(key, path, partial(sync_path, path)) for path, key in paths.items())
    return run_pooled(jobs, num_threads)


def by_chunk(
    array: ArraySpec, region: Region, memory: HostArray
) -> Iterator[tuple[Region, HostArray]]:
    """The part of ``region`` in each of its chunks, with the part of ``memory`` that belongs to it.

    A library that is asked for many chunks at once holds all of them in memory, and may report the
    first failure while it still moves others.
    """
    for index in array.chunks_of(region):
        box = region.intersect(array.chunk_region(index))
        if box is not None:
            yield box, memory[box.within(region).slices() or ...]  # () would copy a scalar


def library_nbytes(array: ArraySpec) -> int:
    """Memory that a library takes to encode or decode one chunk of the array, in bytes."""
    return array.chunk_nbytes * (1 if array.is_raw else 2)
