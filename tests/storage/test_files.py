"""Small files are whole and durable, or not there; operating system errors speak our words."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.storage.files import read_file, write_file
from dist_ckpt_strategies.storage.io_pool import storage_error
from tests.support.disks import fill_disk


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * (1 << 20)])
def test_a_file_holds_what_was_written_and_nothing_is_left_beside_it(
    content: bytes, tmp_path: Path
) -> None:
    write_file(tmp_path / "file", content)
    write_file(tmp_path / "other", memoryview(content))

    assert (tmp_path / "file").read_bytes() == (tmp_path / "other").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_a_file_that_does_not_fit_leaves_the_old_one_and_nothing_else(small_disk: Path) -> None:
    write_file(small_disk / "file", b"old")
    fill_disk(small_disk, leaving_nbytes=8 << 10)

    with pytest.raises(OSError, match="No space left") as caught:
        write_file(small_disk / "file", b"\0" * (32 << 10))
    assert caught.value.errno == errno.ENOSPC
    assert (small_disk / "file").read_bytes() == b"old"
    assert sorted(path.name for path in small_disk.iterdir()) == [".ballast", "file"]


def test_a_directory_in_the_files_place_stays_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()

    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "file", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (lambda path: path.symlink_to(path.name), "Too many levels"),
        (Path.mkdir, "Is a directory"),
    ],
)
def test_what_is_no_file_is_an_error_and_not_waited_for(
    make: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "f")

    with pytest.raises(OSError, match=words):
        read_file(tmp_path / "f")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left; free some"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "permission denied"),
        (errno.EROFS, "read-only"),
        (errno.ENAMETOOLONG, "too long"),
        (errno.EMFILE, "ulimit"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_an_error_of_the_system_names_key_file_and_meaning(number: int, words: str) -> None:
    cause = OSError(number, os.strerror(number), "/ckpt/w/0.0")
    error = storage_error("layer.w", Path("/ckpt/w/0.0"), cause)

    assert type(error) is StorageError
    assert str(error).startswith("layer.w: /ckpt/w/0.0: ")
    assert words in str(error)
    assert (error.key, error.path) == ("layer.w", "/ckpt/w/0.0")


def test_what_is_missing_means_what_the_caller_says() -> None:
    cause = FileNotFoundError(errno.ENOENT, "x")

    assert isinstance(storage_error("w", "/a", cause), IncompleteCheckpointError)
    found = storage_error("w", "/a", cause, not_found=ArrayNotFoundError)
    assert isinstance(found, ArrayNotFoundError)
    assert str(found) == "w: /a does not exist"
