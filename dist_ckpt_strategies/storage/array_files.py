"""What every engine does around the data of arrays: write metadata, flush the names of files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.storage.base import Transfer
from dist_ckpt_strategies.storage.files import sync_path
from dist_ckpt_strategies.storage.transfers import Job, run_pooled
from dist_ckpt_strategies.storage.zarr2 import Zarr2Layout


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
