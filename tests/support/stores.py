"""Write and read whole arrays in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dist_ckpt_strategies.config import Engine, Options
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.formats.zarr2_arrays import open_array_store
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayStore, ArrayWrite
from tests.support.samples import Values, array_of, whole_of

TIMEOUT_S = 60.0


def store_of(root: Path, engine: Engine) -> ArrayStore:
    """The engine's store over a checkpoint directory."""
    return open_array_store(root, Options(engine=engine, io_threads=16, timeout_s=TIMEOUT_S))


def write_array(
    root: Path,
    engine: Engine,
    values: Values,
    *,
    key: str = "w",
    chunk: tuple[int, ...] | None = None,
) -> ArraySpec:
    """Create an array and write all of it at once."""
    array = array_of(values, chunk, key)
    store = store_of(root, engine)
    store.begin_creates([array]).wait(TIMEOUT_S)
    store.begin_writes([ArrayWrite(array, whole_of(array), values)]).wait(TIMEOUT_S)
    return array


def read_array(root: Path, engine: Engine, key: str = "w", region: Region | None = None) -> Values:
    """What the array of that key holds, by its own metadata."""
    array = Zarr2Layout(root).find(key)
    box = whole_of(array) if region is None else region
    target = np.empty(box.shape, array.dtype.numpy)
    target.reshape(-1).view(np.uint8)[...] = 0xA5
    read_into(root, engine, array, box, target)
    return target


def read_into(root: Path, engine: Engine, array: ArraySpec, box: Region, target: Values) -> None:
    """Read a box into given memory."""
    store_of(root, engine).begin_reads([ArrayRead(array, box, target)]).wait(TIMEOUT_S)


def chunk_files(root: Path, array: ArraySpec) -> Sequence[Path]:
    """The files of all chunks."""
    return [Zarr2Layout(root).chunk_path(array, index) for index in array.chunk_indices()]
