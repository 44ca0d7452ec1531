"""What a conversion has done so far, one line for each unit, in a file that outlives a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from dist_ckpt_strategies.errors import CheckpointExistsError
from dist_ckpt_strategies.storage.files import (
    PARTIAL_PREFIX,
    file_errors,
    read_file,
    sync_path,
    write_file,
)

JOURNAL_NAME = f"{PARTIAL_PREFIX}conversion.jsonl"

Record = Mapping[str, Any]
"""What has to be known of a unit afterwards, of JSON types."""


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
                write_file(self._path, _line(purpose))
            content = read_file(self._path)
            whole = 0
            for number, (end, value) in enumerate(_lines(content)):
                if number == 0 and value != purpose:
                    raise _of_another(root)
                whole = end
                if number:
                    self.done[int(value[0])] = value[1]
            if not whole:
                raise _of_another(root)
            os.truncate(self._path, whole)

    def add(self, records: Mapping[int, Record]) -> None:
        """Note units as done, durably; their files are durable already."""
        with file_errors(None, self._path), self._path.open("ab") as file:
            file.write(b"".join(_line([number, record]) for number, record in records.items()))
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Forget it all, durably: the conversion is complete."""
        with file_errors(None, self._path):
            self._path.unlink(missing_ok=True)
            sync_path(self._path.parent)


def _of_another(root: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{root} holds an unfinished conversion of another checkpoint, of another state of this "
        "one, or with other options; repeat that one, or remove the directory",
        path=str(root),
    )


def _line(value: Any) -> bytes:
    content = json.dumps(value, separators=(",", ":")).encode()
    return _digest(content) + b" " + content + b"\n"


def _lines(content: bytes) -> Iterator[tuple[int, Any]]:
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
