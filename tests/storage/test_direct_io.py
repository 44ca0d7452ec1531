"""Transfers past the page cache move the same bytes, whatever the offsets and sizes."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.storage.direct_io import (
    BLOCK_NBYTES,
    BounceBuffers,
    Bytes,
    read_direct,
    start_direct,
)
from dist_ckpt_strategies.storage.file_systems import file_access, file_system_type
from tests.support.disks import tiny_ext4, tiny_tmpfs

FEWER = settings(max_examples=40)
RAW = np.random.default_rng(0).integers(0, 256, 12 * BLOCK_NBYTES, np.uint8)


def small_buffer(num_blocks: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, num_blocks * BLOCK_NBYTES), np.uint8)


@contextmanager
def opened_direct(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags, 0o666)
    try:
        if not start_direct(handle):
            pytest.skip("no direct transfers on this file system")
        yield handle
    finally:
        os.close(handle)


@FEWER
@given(
    size=st.integers(0, RAW.size),
    offset=st.integers(0, RAW.size),
    length=st.integers(0, RAW.size),
    num_blocks=st.integers(3, 5),
)
def test_any_stretch_of_a_file_is_read_and_its_end_is_noticed(
    size: int, offset: int, length: int, num_blocks: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(RAW[:size].tobytes())
    target = np.full(length, 0xEE, np.uint8)
    with opened_direct(path, os.O_RDONLY) as handle:
        count = read_direct(handle, offset, target, small_buffer(num_blocks))
    expected = RAW[:size][offset : offset + length]

    assert count == expected.size
    assert np.array_equal(target[:count], expected)
    assert bool((target[count:] == 0xEE).all())


def test_a_file_system_without_direct_transfers_is_told_from_one_that_has_them(
    tmp_path: Path,
) -> None:
    with tiny_ext4(tmp_path / "ext4") as directory:
        assert file_system_type(directory) == "ext4"
        assert file_access(directory, Options()).is_direct
        assert file_access(directory / "not" / "yet" / "there", Options()).is_direct
    with tiny_tmpfs(tmp_path / "tmpfs") as directory:
        assert file_system_type(directory) == "tmpfs"
        assert not file_access(directory, Options()).is_direct


def test_buffers_are_aligned_and_never_shared_between_threads_at_work() -> None:
    buffers = BounceBuffers()
    together = threading.Barrier(4, timeout=60.0)
    addresses: list[int] = []

    def work() -> None:
        with buffers.borrowed() as buffer:
            addresses.append(buffer.ctypes.data)
            together.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(addresses)) == 4
    assert all(address % BLOCK_NBYTES == 0 for address in addresses)
