"""Shards on a disk: there when they are whole, refused when they are not, and never half of one."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.local.shard_files import (
    ShardDirectory,
    ShardReader,
    ShardWriter,
)
from dist_ckpt_strategies.local.shard_format import (
    BufferSpec,
    LocalShard,
    LocalShardId,
    SaveId,
    encode_footer,
)
from dist_ckpt_strategies.storage.files import PARTIAL_PREFIX

PART = LocalShard(
    LocalShardId(SaveId(7, "a1"), 1),
    2,
    "run",
    "basic",
    (BufferSpec("w", DType.UINT8, (5000,)),),
)
CONTENT = np.arange(5000).astype(np.uint8)
SIZE = 5000 + len(encode_footer(PART, [5]))


def begun(directory: ShardDirectory, holder: int = 1) -> ShardWriter:
    writer = directory.create(PART, holder)
    writer.write(PART.byte_offsets[0], CONTENT)
    return writer


def written(directory: ShardDirectory, holder: int = 1) -> Path:
    """The file of a finished shard."""
    writer = begun(directory, holder)
    writer.finish([5])
    return writer.path


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_a_part_appears_when_it_is_finished_and_not_before(tmp_path: Path) -> None:
    directory = ShardDirectory(tmp_path / "root")
    before = directory.find()
    writer = begun(directory)
    between = directory.find()
    writer.finish([5])

    assert (before, between) == ([], [])
    assert [(one.shard_id, one.holder) for one in directory.find()] == [(PART.shard_id, 1)]
    assert files_below(tmp_path) == [f"root/1/{PART.shard_id}.part"]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_part_that_cannot_be_finished_does_not_appear(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ShardDirectory(tmp_path)
    writer = begun(directory)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StorageError, match="no space left"):
        writer.finish([5])

    assert directory.find() == []
    writer.abandon()
    assert files_below(tmp_path) == []


def test_a_file_of_an_earlier_release_is_refused_by_name(tmp_path: Path) -> None:
    path = written(ShardDirectory(tmp_path))
    path.write_bytes(b"DCKPART1" + bytes(5000))
    with pytest.raises(CorruptCheckpointError, match="in this release"):
        ShardReader(path)


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    path = written(ShardDirectory(tmp_path))
    for other in (
        LocalShardId(SaveId(8, "a1"), 1),
        LocalShardId(SaveId(7, "a2"), 1),
        LocalShardId(SaveId(7, "a1"), 0),
    ):
        path = path.rename(path.with_name(f"{other}.part"))
        with pytest.raises(CorruptCheckpointError, match=f"holds {PART.shard_id}"):
            ShardReader(path)


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop", "dangling"])
def test_what_is_no_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    directory = ShardDirectory(tmp_path)
    path = directory.holder_directory(1) / f"{PART.shard_id}.part"
    path.parent.mkdir()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "dangling": "nowhere"}[kind])
    started = time.monotonic()
    with pytest.raises(CheckpointError):
        ShardReader(directory.find()[0].path)
    assert time.monotonic() - started < 60


def test_only_names_of_parts_below_names_of_ranks_are_found(tmp_path: Path) -> None:
    directory = ShardDirectory(tmp_path)
    path = written(directory)
    content = path.read_bytes()
    for name in ("01", "-1", "x", "1.5", "٣", "12/3"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / path.name).write_bytes(content)
    (tmp_path / "7").write_bytes(content)
    (tmp_path / path.name).write_bytes(content)
    for name in (f"{PARTIAL_PREFIX}0", path.name + ".part", path.stem, "iter_7_1_local_a1.part"):
        path.with_name(name).write_bytes(content)

    assert [found.path for found in directory.find()] == [path]
    assert directory.holders() == [1, 12]


def test_what_a_killed_writer_leaves_is_never_listed_and_is_removed(tmp_path: Path) -> None:
    directory = ShardDirectory(tmp_path)
    kept = written(directory, holder=1)
    script = (
        "import sys, time; from pathlib import Path\n"
        "from tests.local.test_shard_files import begun, ShardDirectory\n"
        "writer = begun(ShardDirectory(Path(sys.argv[1])))\n"
        "print('there', flush=True); time.sleep(300)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        directory.remove_stale_files(1)
        process.send_signal(signal.SIGKILL)
    left = [path for path in files_below(tmp_path) if PARTIAL_PREFIX in path]

    assert len(left) == 1
    assert [found.path for found in directory.find()] == [kept]
    directory.remove_stale_files(1)
    assert files_below(tmp_path) == [str(kept.relative_to(tmp_path))]


def test_what_another_manager_is_writing_is_not_removed(tmp_path: Path) -> None:
    writer = begun(ShardDirectory(tmp_path))
    other = ShardDirectory(tmp_path)

    other.remove_stale_files(1)
    writer.finish([5])
    assert [found.path for found in other.find()] == [writer.path]


def test_a_file_that_is_taken_for_a_leftover_before_it_is_locked_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    taken: list[Path] = []

    def take_first(handle: int, how: int) -> None:
        if not taken:
            taken.extend((tmp_path / "1").iterdir())
            taken[0].unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", take_first)
    path = written(ShardDirectory(tmp_path))

    assert len(taken) == 1
    with ShardReader(path) as reader:
        assert reader.shard == PART


def test_a_file_system_without_locks_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    directory = ShardDirectory(tmp_path)
    path = written(directory)
    begun(directory)
    directory.remove_stale_files(1)

    assert files_below(tmp_path) == [str(path.relative_to(tmp_path))]


def test_odd_leftovers_are_a_storage_error_or_gone(tmp_path: Path) -> None:
    holder = tmp_path / "1"
    holder.mkdir()
    os.mkfifo(holder / f"{PARTIAL_PREFIX}pipe")
    (holder / f"{PARTIAL_PREFIX}link").symlink_to("nowhere")
    ShardDirectory(tmp_path).remove_stale_files(1)
    assert list(holder.iterdir()) == []

    (holder / f"{PARTIAL_PREFIX}directory").mkdir()
    with pytest.raises(StorageError, match="directory"):
        ShardDirectory(tmp_path).remove_stale_files(1)


def test_the_name_of_every_new_directory_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    fsync = os.fsync

    def recorded(handle: int) -> None:
        fsync(handle)
        flushed.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", recorded)
    directory = ShardDirectory(tmp_path / "a" / "b" / "root")
    path = written(directory)
    changed = [path, *path.parents[: len(path.parents) - len(tmp_path.parents)]]

    assert changed[-1] == tmp_path
    assert {one.stat().st_ino for one in changed} <= flushed


def test_a_directory_has_one_name_however_it_is_reached(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to("one")

    assert ShardDirectory(tmp_path / "link").name() == ShardDirectory(one).name()
    assert ShardDirectory(one).name() != ShardDirectory(other).name()
