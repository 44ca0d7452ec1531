"""What a store has written is flushed when ``begin_syncs`` is done, one way or the other."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.formats import arrays as stores
from dist_ckpt_strategies.storage import file_systems
from dist_ckpt_strategies.storage.file_systems import FileAccess, file_access
from dist_ckpt_strategies.storage.store import ArrayWrite
from tests.support.leaks import open_files_below
from tests.support.stores import TIMEOUT_S, store_of

LINUX = sys.platform == "linux"

ARRAYS = (
    ArraySpec("w", (8, 4), DType.FLOAT32, (4, 4)),
    ArraySpec("deep/er/w", (300_000,), DType.FLOAT32, (150_000,)),
    ArraySpec("deep", (5,), DType.BFLOAT16, (5,)),
    ArraySpec("padded", (7,), DType.INT16, (4,)),
    ArraySpec("empty", (0,), DType.INT16, (4,)),
)


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Inodes of the files and directories that were flushed one by one."""
    inodes: set[int] = set()
    fsync = os.fsync

    def recorded(handle: int) -> None:
        fsync(handle)
        inodes.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", recorded)
    return inodes


def save_all(root: Path) -> None:
    """Creations and writes, at once as in a save unless told otherwise, then the flush."""
    store = store_of(root)
    writes = [
        ArrayWrite(array, box, np.ones(box.shape, array.dtype.numpy))
        for array in ARRAYS
        for index in array.chunk_indices()
        for box in [array.chunk_region(index).intersect(Region.whole(array.shape))]
        if box is not None
    ]
    creating = store.begin_creates(ARRAYS)
    writing = store.begin_writes(writes)
    creating.wait(TIMEOUT_S)
    writing.wait(TIMEOUT_S)
    store.begin_syncs(ARRAYS).wait(TIMEOUT_S)


def test_one_by_one_every_file_and_every_directory_is_flushed(
    tmp_path: Path, flushed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "whole_flush", lambda _: None)
    save_all(tmp_path)

    written = {tmp_path, *tmp_path.rglob("*")}
    assert len(written) > 10
    assert {str(path) for path in written if path.stat().st_ino not in flushed} == set()


def test_all_at_once_nothing_is_written_after_the_flush_nor_before_it_is_opened(
    tmp_path: Path, flushed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, set[Path]]] = []

    def files() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if path.is_file()}

    def opened(directory: Path) -> Any:
        seen.append(("opened", files()))
        return file_systems.whole_flush(directory)

    def run(handle: int) -> int:
        assert os.fstat(handle).st_ino == tmp_path.stat().st_ino
        seen.append(("run", files()))
        return 0

    flush_whole(monkeypatch, run)
    monkeypatch.setattr(stores, "whole_flush", opened)
    save_all(tmp_path)

    assert [name for name, _ in seen] == ["opened", "run"]
    assert seen[0][1] == set()
    assert seen[1][1] == files()
    assert flushed == set()


def flush_whole(monkeypatch: pytest.MonkeyPatch, syncfs: Callable[[int], int]) -> None:
    """Have every file system flushed whole, by a function in the place of syncfs."""

    def access(root: Path, options: Options) -> FileAccess:
        return replace(file_access(root, options), is_flushed_whole=True)

    monkeypatch.setattr(stores, "file_access", access)
    monkeypatch.setattr(file_systems, "_c_library", lambda: SimpleNamespace(syncfs=syncfs))
    monkeypatch.setattr(file_systems, "_numbers", lambda _: {"Dirty:": 0})
    monkeypatch.setattr("platform.release", lambda: "6.1")


def test_a_flush_that_fails_is_an_error_that_names_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    flush_whole(monkeypatch, failing)
    with pytest.raises(StorageError, match="flush of its file system: Input/output") as caught:
        save_all(tmp_path)
    assert caught.value.path == str(tmp_path)


@pytest.mark.skipif(not LINUX, reason="syncfs is Linux's")
def test_the_real_flush_runs_and_leaves_no_open_file(tmp_path: Path) -> None:
    flush = file_systems.whole_flush(tmp_path)
    if flush is not None:
        flush()
    del flush
    gc.collect()

    assert open_files_below(tmp_path) == []


@pytest.mark.skipif(not LINUX, reason="syncfs is Linux's")
@pytest.mark.parametrize(
    ("meminfo", "release", "is_whole"),
    [
        ("Dirty:   1024 kB\nWriteback:  0 kB\n", "5.8.0-generic", True),
        ("Dirty: 300000 kB\nWriteback:  0 kB\n", "6.1.0", False),
        ("Dirty:      0 kB\nWriteback:  300000 kB\n", "6.1.0", False),
        ("Dirty:   1024 kB\nWritebackTmp:  300000 kB\n", "6.1", True),
        ("Dirty:   1024 kB\nWriteback:  0 kB\n", "5.7.19", False),
        ("Dirty:   1024 kB\nWriteback:  0 kB\n", "4.18.0-553.el8", False),
        (None, "6.1.0", False),
    ],
)
def test_the_whole_file_system_is_flushed_only_where_little_waits_and_errors_are_told(
    meminfo: str | None,
    release: str,
    is_whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "meminfo"
    if meminfo is not None:
        path.write_text(meminfo)
    monkeypatch.setattr(file_systems, "_MEMORY_INFO", path)
    monkeypatch.setattr("platform.release", lambda: release)
