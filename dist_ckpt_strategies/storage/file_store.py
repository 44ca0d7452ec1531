"""The small files of a checkpoint, under names below its root: in a directory or a bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from dist_ckpt_strategies.storage.disk.files import (
    file_errors,
    read_file,
    read_span,
    sync_path,
    write_file,
)


class FileStore(Protocol):
    """A directory, or what stands for one. Names have ``/`` between their parts.

    Every method raises StorageError, naming the file, where storage fails.
    """

    def __str__(self) -> str:
        """The directory as its user calls it."""
        ...

    def path(self, name: str) -> str:
        """A file as its user calls it."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            IncompleteCheckpointError: it is missing.
        """
        ...

    def read_span(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        """Some bytes of a file; fewer where it ends before.

        Raises:
            IncompleteCheckpointError: it is missing.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Make a file, whole and durable, or replace it."""
        ...

    def names(self, prefix: str) -> Iterator[str]:
        """Every file whose name starts with ``prefix/``, at any depth, in no order."""
        ...


class Directory:
    """A directory of a file system; see FileStore.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        """See FileStore."""
        return str(self.root)

    def path(self, name: str) -> str:
        """See FileStore."""
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes:
        """See FileStore."""
        path = self.path(name)
        with file_errors(None, path):
            return read_file(path)

    def read_span(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        """See FileStore."""
        path = self.path(name)
        with file_errors(None, path):
            return read_span(path, byte_offset, nbytes)

    def write(self, name: str, content: bytes) -> None:
        """See FileStore."""
        path = Path(self.path(name))
        with file_errors(None, path):
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync_path(path.parent.parent)
            write_file(path, content)

    def names(self, prefix: str) -> Iterator[str]:
        """See FileStore."""
        with file_errors(None, self.path(prefix)):
            for directory, _, files in os.walk(self.path(prefix)):
                below = os.path.relpath(directory, self.root)
                yield from (f"{below}/{name}" for name in files)
