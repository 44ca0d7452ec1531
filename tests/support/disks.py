"""Disks that are full or read-only, where this machine allows to make some."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tiny_disk(mount_point: Path, nbytes: int) -> Iterator[Path]:
    """A file system of its own, of that size, empty. Skips the test where it cannot be mounted."""
    mount_point.mkdir()
    _require(
        _run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(mount_point)),
        "mounting a tmpfs is not permitted here",
    )
    try:
        yield mount_point
    finally:
        _run("umount", "--lazy", str(mount_point))


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Nobody, root included, can write below the directory meanwhile; it is a mount point."""
    _require(
        _run("mount", "-o", "remount,ro", str(directory)), "remounting is not permitted here"
    )
    try:
        yield
    finally:
        _run("mount", "-o", "remount,rw", str(directory))


def fill_disk(directory: Path, *, leaving_nbytes: int = 0) -> None:
    """Use up the space of a tiny disk."""
    ballast = directory.parent / directory.name / ".ballast"
    space = os.statvfs(directory)
    with ballast.open("wb") as file:
        file.write(b"\xaa" * max(0, space.f_bavail * space.f_frsize - leaving_nbytes))


def _run(program: str, *args: str) -> bool:
    found = shutil.which(program)
    if found is None:
        return False
    return subprocess.run([found, *args], capture_output=True, check=False).returncode == 0


def _require(worked: bool, reason: str) -> None:  # noqa: FBT001
    if not worked:
        pytest.skip(reason)
