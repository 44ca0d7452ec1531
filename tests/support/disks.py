"""Disks that are full or read-only, where this machine allows to make some, and the user nobody."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

NOBODY = 65534


@contextmanager
def tiny_tmpfs(mount_point: Path) -> Iterator[Path]:
    """256 KiB in memory, empty. Skips the test where it cannot be mounted."""
    with _mounted(mount_point, "-t", "tmpfs", "-o", f"size={256 << 10},nr_inodes=1000", "tmpfs"):
        yield mount_point


@contextmanager
def tiny_ext4(mount_point: Path) -> Iterator[Path]:
    """4 MiB of a disk, empty. Skips the test where it cannot be mounted."""
    image = mount_point.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(4 << 20)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image))
    with _mounted(mount_point, "-o", "loop", str(image)):
        (mount_point / "lost+found").rmdir()
        yield mount_point


@contextmanager
def _mounted(mount_point: Path, *what: str) -> Iterator[None]:
    mount_point.mkdir()
    _require(_run("mount", *what, str(mount_point)), f"mounting {what} is not permitted here")
    try:
        yield
    finally:
        _run("umount", "--lazy", str(mount_point))


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """No user, root included, can write below the directory meanwhile; it is a mount point.

    It is busy while another rank has the staging directory open, until its save has returned.
    """
    remount = ("mount", "-o", "remount,ro", str(directory))
    deadline = time.monotonic() + 10.0
    while not (is_done := _run(*remount)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _require(is_done, "remounting is not permitted here")
    try:
        yield
    finally:
        _run("mount", "-o", "remount,rw", str(directory))


@contextmanager
def without_root() -> Iterator[None]:
    """The block runs as nobody, in this process alone; permissions mean nothing to root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def fill_disk(directory: Path, *, leaving_nbytes: int = 0) -> None:
    """Use up the space of a tiny disk."""
    ballast = directory / ".ballast"
    space = os.statvfs(directory)
    with ballast.open("wb", buffering=0) as file:
        file.write(b"\xaa" * max(0, space.f_bavail * space.f_frsize - leaving_nbytes))
        with suppress(OSError):
            while leaving_nbytes == 0:
                file.write(b"\xaa" * 512)


def fill_inodes(directory: Path) -> Path:
    """Use up the inodes of a tiny disk, for files in the directory that is returned."""
    ballast = directory / ".inodes"
    ballast.mkdir()
    with suppress(OSError):
        for number in range(1 << 20):
            (ballast / str(number)).touch()
    return ballast


def _run(program: str, *args: str) -> bool:
    found = shutil.which(program)
    if found is None:
        return False
    return subprocess.run([found, *args], capture_output=True, check=False).returncode == 0


def _require(worked: bool, reason: str) -> None:
    if not worked:
        pytest.skip(reason)
