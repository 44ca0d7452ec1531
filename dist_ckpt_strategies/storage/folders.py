"""Directories: what is in them, and their removal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.storage.files import Directory, reason

if TYPE_CHECKING:
    from dist_ckpt_strategies.storage.bucket import Place


@dataclass(frozen=True, slots=True)
class Folder:
    """One directory.

    Attributes:
        key: its path relative to the root of the tree, ``/`` between parts; empty for the root.
        files: size in bytes of each regular file in it, by name.
        folders: names of the directories in it, sorted.
        links: names of links to directories in it, sorted.
        others: names of what is none of these, such as pipes and links to nothing, sorted.
        failure: why it could not be read; None where it could.
    """

    key: str
    files: dict[str, int]
    folders: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the files in it."""
        return sum(self.files.values())

    def path_of(self, name: str) -> str:
        """The key of a file in the directory."""
        return f"{self.key}/{name}" if self.key else name


def read_folder(root: Path, key: str) -> Folder:
    """One directory; empty where it is gone."""
    files: dict[str, int] = {}
    folders: list[str] = []
    links: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(os.path.join(root, key)) as entries:  # noqa: PTH118 - 10,000 times
            for entry in entries:
                try:
                    if entry.is_dir():
                        (links if entry.is_symlink() else folders).append(entry.name)
                    elif entry.is_file():
                        files[entry.name] = entry.stat().st_size
                    else:
                        others.append(entry.name)
                except OSError:  # a link in a circle; gone meanwhile
                    others.append(entry.name)
    except FileNotFoundError:
        return Folder(key, {})
    except OSError as error:
        return Folder(key, {}, failure=reason(error))
    return Folder(key, files, tuple(sorted(folders)), tuple(sorted(links)), tuple(sorted(others)))


def folders_below(root: Path, keys: Iterable[str]) -> Iterator[Folder]:
    """The directories of those keys and all below them; links are not followed."""
    waiting = list(keys)
    while waiting:
        folder = read_folder(root, waiting.pop())
        yield folder
        waiting.extend(map(folder.path_of, folder.folders))


def files_below(store: Place, folder: str) -> list[str]:
    """The files below a folder of a place; StorageError if it cannot be read."""
    if not isinstance(store, Directory):
        return list(store.names(f"{folder}/"))
    names: list[str] = []
    for listing in folders_below(store.root, [folder]):
        if listing.failure:
            raise StorageError(f"{listing.key}: {listing.failure}", path=listing.key)
        names += map(listing.path_of, listing.files)
    return names


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory, or a link to one; a link in a circle is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False
