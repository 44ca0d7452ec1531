"""The floor of tools that read a checkpoint, or copy one: its files, on a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from benchmarks.measuring.disks import files_below

_BLOCK = 4 << 20


def read_files(directory: Path, num_threads: int) -> int:
    """Read every file below, in blocks, into memory in use; how many bytes there were."""
    return _each(directory, num_threads, _read)


def copy_files(directory: Path, target: Path, num_threads: int) -> int:
    """Read every file below, and write and flush it below ``target``; how many bytes there were."""

    def copy(source: Path, block: memoryview) -> int:
        to = target / source.relative_to(directory)
        to.parent.mkdir(parents=True, exist_ok=True)
        with to.open("wb", buffering=0) as file:
            nbytes = _read(source, block, file.write)
            os.fsync(file.fileno())
        return nbytes

    return _each(directory, num_threads, copy)


def _each(directory: Path, num_threads: int, body: Callable[[Path, memoryview], int]) -> int:
    """The largest first, so that the threads end together; each thread has one block of memory."""
    blocks: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(num_threads):
        blocks.put(memoryview(bytearray(_BLOCK)))

    def run(path: Path) -> int:
        block = blocks.get()
        try:
            return body(path, block)
        finally:
            blocks.put(block)

    files = sorted(files_below(directory), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(run, files))


def _read(
    path: Path, block: memoryview, write: Callable[[memoryview], object] | None = None
) -> int:
    done = 0
    with path.open("rb", buffering=0) as file:
        while found := file.readinto(block):
            done += found
            if write is not None:
                write(block[:found])
    return done
