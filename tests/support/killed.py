"""Every state that a kill at any moment can leave: what is stored before each change of it.

A process that is killed has carried out some of its calls, in their order, and no further one. So a
copy before each call is what a kill there would leave; a process for each is not needed.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.storage.bucket import SCHEMES, Bucket
from tests.support.entries import prepare
from tests.support.system_calls import before_calls

_CALLS = ("open", "write", "writev", "fsync", "mkdir", "replace", "rename", "unlink", "rmdir")

Signature = tuple[tuple[str, int, int, int], ...]


def signature(root: Path) -> Signature:
    """All that is there: names, inodes, sizes and times of change."""
    found = sorted((str(path), path.lstat()) for path in root.rglob("*"))
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found)


@contextmanager
def recorded(root: Path, into: Path) -> Iterator[list[Path]]:
    """Within the block every state of a directory is copied to one of the list."""
    states: list[Path] = []
    last: list[Signature] = [()]
    copying = threading.RLock()
    inside = threading.local()

    def copy(_name: str = "", path: str = "") -> None:
        is_elsewhere = path.startswith("/") and not path.startswith(str(root))
        if getattr(inside, "copies", False) or is_elsewhere:
            return
        with copying:
            inside.copies = True
            try:
                if root.exists() and (now := signature(root)) != last[0]:
                    last[0] = now
                    states.append(into / f"{len(states):03d}")
                    shutil.copytree(root, states[-1])
            finally:
                inside.copies = False

    with before_calls(copy, _CALLS):
        yield states
        copy()


def with_halves(states: list[Path], names: tuple[str, ...]) -> list[Path]:
    """The states, and those with half of a file that another program writes in place."""
    found: list[Path] = []
    for state in states:
        for name in names:
            file, before = state / name, found[-1] / name if found else state / "nothing"
            if file.exists() and not (before.exists() and is_same(before, file)):
                half, content = state.with_name(f"{state.name}-half-{name}"), file.read_bytes()
                shutil.copytree(found[-1] if found else state, half)
                (half / name).write_bytes(content[: len(content) // 2])
                found.append(half)
        found.append(state)
    return found


def is_same(one: Path, other: Path) -> bool:
    return one.stat().st_mtime_ns == other.stat().st_mtime_ns


class MemoryBucket(Bucket):
    """Objects in a dictionary of this process; each change appends a copy to ``STATES``."""

    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        path = self.path(name)
        if path not in OBJECTS:
            raise IncompleteCheckpointError(f"{path} does not exist", path=path)
        content = OBJECTS[path][byte_offset:]
        if nbytes > len(content):
            raise CorruptCheckpointError(f"{path} ends too early", path=path)
        return content if nbytes < 0 else content[:nbytes]

    def write(self, name: str, content: bytes | bytearray) -> None:
        path = self.path(name)
        for act in BEFORE_WRITES:
            act(path)
        OBJECTS[path] = bytes(content)
        STATES.append(dict(OBJECTS))

    def create(self, name: str, content: bytes) -> bool:
        if self.has(name):
            return False
        self.write(name, content)
        return True

    def has(self, name: str) -> bool:
        return self.path(name) in OBJECTS

    def names(self, start: str = "") -> list[str]:
        place = self.path("")
        found = [path.removeprefix(place) for path in list(OBJECTS) if path.startswith(place)]
        return [name for name in found if name.startswith(start)]

    def delete(self, names: Any) -> None:
        for name in names:
            OBJECTS.pop(self.path(name), None)
            STATES.append(dict(OBJECTS))


OBJECTS: dict[str, bytes] = {}
STATES: list[dict[str, bytes]] = []
BEFORE_WRITES: list[Any] = []
SCHEMES["memory"] = MemoryBucket


def in_memory(state: dict[str, bytes]) -> None:
    """Have this be what all buckets hold."""
    OBJECTS.clear()
    OBJECTS.update(state)


def copied_to(state: Path, root: Path) -> Path:
    """A copy of a state in the place that it is of."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(state, root)
    return root


def no_writer_process() -> None:
    """Have saves in the background write in this process, by calls that can be seen."""
    os.environ |= {"DIST_CKPT_WRITER_PROCESS": "0", "DIST_CKPT_DIRECT_IO": "0"}
    prepare(60)
