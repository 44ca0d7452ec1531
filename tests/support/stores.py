"""Write and read whole arrays in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from dist_ckpt_strategies.config import Engine, Options
from dist_ckpt_strategies.core.array import ArraySpec, Region
from dist_ckpt_strategies.formats.arrays import DirectoryWriter, Format1Reader
from dist_ckpt_strategies.formats.zarr2 import find_array
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayReader, ArrayWrite, ArrayWriter
from tests.support.samples import Values, array_of, whole_of

TIMEOUT_S = 60.0


class ArrayStore(ArrayReader, ArrayWriter, Protocol):
    """What writes and reads arrays."""


class Arrays:
    """What writes and reads the arrays of a checkpoint directory of format 1.

    Args:
        root: the directory.
        engine: decodes chunks that are not raw.
    """

    def __init__(self, root: Path, engine: Engine) -> None:
        options = Options(engine=engine, io_threads=16, timeout_s=TIMEOUT_S)
        writer = DirectoryWriter(root, options)
        self.begin_creates = writer.begin_creates
        self.begin_writes = writer.begin_writes
        self.begin_syncs = writer.begin_syncs
        self.begin_reads = Format1Reader(root, options).begin_reads


def store_of(root: Path, engine: Engine = Engine.TENSORSTORE) -> Arrays:
    """What writes and reads the arrays of a checkpoint directory."""
    return Arrays(root, engine)


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
    array = find_array(root, key)
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
    return [root / array.key / array.chunk_name(index) for index in array.chunk_indices()]
