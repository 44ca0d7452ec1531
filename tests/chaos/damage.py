"""Bytes that change, and a disk that is full."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.format2_files import HARMLESS, Fault, Kind
from tests.chaos.local_files import file_map
from tests.chaos.oracle import CopyKey, Place
from tests.chaos.sites import Site
from tests.support.disks import fill_disk

_TENSOR_SHARE = 0.4
DISK_NBYTES = 32 << 20


def flip_global(site: Site, name: str, chance: random.Random, change: int) -> bool:
    """Change a byte of a global checkpoint: of any file, the small ones as often as the large.

    Returns whether a load need not notice. Of the marker, what JSON says is nothing may change too.
    """
    files = site.files(name)
    file = chance.choice([one for one, content in sorted(files.contents.items()) if content])
    content = bytearray(files.contents[file])
    at = chance.randrange(len(content))
    content[at] ^= change
    site.write(name, file, bytes(content))
    kind = files.kind_at(file, at)
    return kind is Kind.MARKER or (Fault.FLIP, kind) in HARMLESS


def flip_copy(path: Path, chance: random.Random, change: int) -> Place:
    """Change a byte of a local checkpoint's file: of a tensor mostly, else of any kind."""
    content = bytearray(path.read_bytes())
    spans = file_map(bytes(content))
    is_tensor = chance.random() < _TENSOR_SHARE
    place = Place.TENSOR if is_tensor else chance.choice(sorted({one.place for one in spans}))
    span = chance.choice([span for span in spans if span.place is place])
    content[chance.randrange(span.start, span.end)] ^= change
    path.write_bytes(content)
    return place


def choose_copies(
    copies: dict[CopyKey, Path], chance: random.Random, *, both: bool
) -> list[CopyKey]:
    """A copy of some part of the newest local save, its owner's if there is; or all copies."""
    newest = max(key.save for key in copies)
    found = sorted(key for key in copies if key.save == newest)
    one = chance.choice([key for key in found if key.owner == key.holder] or found)
    alike = sorted(key for key in copies if key.save == newest and key.owner == one.owner)
    return alike if both else [one]


@contextmanager
def small_disk(mount_point: Path) -> Iterator[bool]:
    """A directory on a disk of its own that can be filled; False: it is not on its own."""
    mount_point.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", str(mount_point)]
    is_mounted = _run("mount", *options)
    try:
        yield is_mounted
    finally:
        if is_mounted:
            _run("umount", "--lazy", str(mount_point))


@contextmanager
def full(disk: Path, leaving_nbytes: int) -> Iterator[None]:
    """Within the block there is no more room than that."""
    fill_disk(disk, leaving_nbytes=leaving_nbytes)
    try:
        yield
    finally:
        (disk / ".ballast").unlink()


def _run(program: str, *args: str) -> bool:
    found = shutil.which(program)
    if found is None:
        return False
    return subprocess.run([found, *args], capture_output=True, check=False).returncode == 0
