"""What a conversion has done so far, one line for each unit, in a file that outlives a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import xxhash

from dist_ckpt_strategies.errors import CheckpointExistsError
from dist_ckpt_strategies.storage.disk.files import (
    PARTIAL_PREFIX,
    file_errors,
    read_file,
    sync_path,
    write_file,
)

JOURNAL_NAME = f"{PARTIAL_PREFIX}conversion.jsonl"

Record = Mapping[str, Any]
"""What has to be known of a unit afterwards, of JSON types."""


class Notes(Protocol):
    """What a conversion has done so far.

    Attributes:
        done: of the units that earlier runs finished, by number.
    """

    done: dict[int, Record]

    def add(self, records: Mapping[int, Record]) -> None:
        """Note units as done, durably; their files are durable already."""
        ...

    def remove(self) -> None:
        """Forget it all, durably: the conversion is complete."""
        ...


class Journal:
    """The journal of a conversion into a directory.

    A line counts if it is whole, by its own digest; the first that is not ends it.

    Args:
        root: the directory, which exists.
        purpose: what tells this conversion from any other.

    Attributes:
        done: of the units that earlier runs finished, by number.

    Raises:
        CheckpointExistsError: the journal there is of another conversion.
        StorageError: it cannot be read or written.
    """

    def __init__(self, root: Path, purpose: str) -> None:
        self._path = root / JOURNAL_NAME
        self.done: dict[int, Record] = {}
        with file_errors(None, self._path):
            if not self._path.exists():
                write_file(self._path, journal_line(purpose))
            content = read_file(self._path)
            whole = 0
            for number, (end, value) in enumerate(journal_lines(content)):
                if number == 0 and value != purpose:
                    raise of_another_conversion(root)
                whole = end
                if number:
                    self.done[int(value[0])] = value[1]
            if not whole:
                raise of_another_conversion(root)
            os.truncate(self._path, whole)

    def add(self, records: Mapping[int, Record]) -> None:
        """Note units as done, durably; their files are durable already."""
        with file_errors(None, self._path), self._path.open("ab") as file:
            file.write(
                b"".join(journal_line([number, record]) for number, record in records.items())
            )
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Forget it all, durably: the conversion is complete."""
        with file_errors(None, self._path):
            self._path.unlink(missing_ok=True)
            sync_path(self._path.parent)


def of_another_conversion(root: object) -> CheckpointExistsError:
    """The error where a place holds the journal of another conversion."""
    return CheckpointExistsError(
        f"{root} holds an unfinished conversion of another checkpoint, of another state of this "
        "one, or with other options; repeat that one, or remove the directory",
        path=str(root),
    )


def journal_line(value: Any) -> bytes:
    """A value of JSON types, behind its digest."""
    content = json.dumps(value, separators=(",", ":")).encode()
    return _digest(content) + b" " + content + b"\n"


def journal_lines(content: bytes) -> Iterator[tuple[int, Any]]:
    """Where each whole line ends, and its value."""
    end = 0
    for line in content.splitlines(keepends=True):
        digest, _, body = line[:-1].partition(b" ")
        if not line.endswith(b"\n") or digest != _digest(body):
            return
        end += len(line)
        yield end, json.loads(body)


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()
