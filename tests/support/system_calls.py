"""Act before the system calls of this process: count them, delay them, or have them fail."""

import builtins
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = (
    *("open", "preadv", "pread", "pwrite", "write", "writev", "fsync", "stat", "lstat", "mkdir"),
    *("scandir", "listdir", "replace", "rename", "unlink", "rmdir"),
)
CHANGES = ("rename", "replace", "unlink", "rmdir")  # calls that change directories


@contextmanager
def before_calls(act: Callable[[str, str], None], names: Iterable[str] = CALLS) -> Iterator[None]:
    """Within the block, ``act(name, path)`` runs before each of these calls of ``os``.

    What it raises is raised by the call. ``open`` is the builtin too, which pathlib calls.
    """
    with pytest.MonkeyPatch.context() as changes:
        for name in names:
            changes.setattr(os, name, _preceded(getattr(os, name), name, act))
            if name == "open":
                opened = _preceded(io.open, name, act)
                changes.setattr(io, "open", opened)
                changes.setattr(builtins, "open", opened)
        yield


def dying_at_change(
    number: int, die: Callable[[], object] = lambda: os._exit(9)
) -> AbstractContextManager[None]:
    """Within the block this process dies at its n-th change of a directory, counted from 1."""
    left = [number]

    def count(_name: str, _path: str) -> None:
        left[0] -= 1
        if left[0] <= 0:
            die()

    return before_calls(count, CHANGES)


def _preceded(
    call: Callable[..., Any], name: str, act: Callable[[str, str], None]
) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        act(name, _path(args[0]) if args else "")
        return call(*args, **options)

    return run


def _path(place: Any) -> str:
    if isinstance(place, int):
        try:
            return str(Path(f"/proc/self/fd/{place}").readlink())
        except OSError:
            return ""
    return os.fsdecode(place) if isinstance(place, (str, bytes, os.PathLike)) else ""
