"""The manifest of a checkpoint, read as far as it is asked for."""

from __future__ import annotations

import difflib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import ArrayNotFoundError, CorruptCheckpointError
from dist_ckpt_strategies.formats.manifest import (
    INDEX_NAME,
    ArrayRecord,
    Fields,
    ObjectRecord,
    PartEntry,
    array_record,
    digest_of,
    object_record,
    parse_index,
    require_complete,
)
from dist_ckpt_strategies.storage.file_store import FileStore


class Manifest:
    """The manifest of a checkpoint, read as far as it is asked for.

    Args:
        file_store: the checkpoint.

    Attributes:
        index: its table of contents.
        digest: of the file of that.

    Raises:
        IncompleteCheckpointError: it has none.
        CorruptCheckpointError: its index is damaged.
        IncompatibleVersionError: a later version of this package wrote it.
    """

    def __init__(self, file_store: FileStore) -> None:
        self._file_store = file_store
        content = file_store.read(INDEX_NAME)
        self.index = parse_index(content, file_store.path(INDEX_NAME))
        self.digest = digest_of(content)
        self._parts: dict[str, _Part] = {}
        self._records: dict[str, ArrayRecord] = {}

    def find(self, key: str) -> ArrayRecord:
        """The array of that key.

        Raises:
            ArrayNotFoundError: there is none; names similar ones.
            CorruptCheckpointError: the part that lists it is damaged.
        """
        found = self._records.get(key)
        if found is None:
            part = self._part_of(key)
            if part is None or key not in part.arrays:
                raise self._not_found(key, list(self.keys()), "array")
            found = self._records[key] = part.array(key)
        return found

    def find_object(self, object_id: ObjectId) -> ObjectRecord:
        """One shard of an object; errors as in ``find``."""
        part = self._part_of(object_id.key)
        if part is None or object_id.unique_key not in part.objects:
            names = [record.id.unique_key for record in self.objects()]
            raise self._not_found(object_id.unique_key, names, "object")
        return part.object(object_id.unique_key)

    def keys(self) -> Iterator[str]:
        """The keys of all arrays, sorted."""
        for entry in self.index.parts:
            yield from self._read(entry).arrays

    def arrays(self) -> Iterator[ArrayRecord]:
        """All arrays, sorted by key."""
        return map(self.find, self.keys())

    def objects(self) -> Iterator[ObjectRecord]:
        """All shards of objects, sorted."""
        for entry in self.index.parts:
            part = self._read(entry)
            yield from map(part.object, part.objects)

    def contents_of(self, entry: PartEntry) -> tuple[list[ArrayRecord], list[ObjectRecord]]:
        """The arrays and objects that one part lists.

        Raises:
            IncompleteCheckpointError: it is missing.
            CorruptCheckpointError: it is damaged.
        """
        part = self._read(entry)
        return list(map(part.array, part.arrays)), list(map(part.object, part.objects))

    def _part_of(self, key: str) -> _Part | None:
        number = bisect_right(self._firsts, key) - 1
        return self._read(self.index.parts[number]) if number >= 0 else None

    @cached_property
    def _firsts(self) -> list[str]:
        return [entry.first for entry in self.index.parts]

    def _read(self, entry: PartEntry) -> _Part:
        if entry.name not in self._parts:
            content = self._file_store.read(entry.name)
            path = self._file_store.path(entry.name)
            if digest_of(content) != entry.digest:
                raise CorruptCheckpointError(
                    f"{path} is damaged: it has digest {digest_of(content)}, "
                    f"expected {entry.digest}",
                    path=path,
                )
            self._parts[entry.name] = _Part(content, path)
        return self._parts[entry.name]

    def _not_found(self, name: str, known: Sequence[str], what: str) -> ArrayNotFoundError:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; similar ones: {', '.join(near)}" if near else ""
        return ArrayNotFoundError(
            f"{name}: no such {what} among the {len(known)} in {self._file_store}{hint}",
            key=name,
            path=self._file_store.path(INDEX_NAME),
        )


class _Part:
    """A part of the manifest, made into records one at a time."""

    def __init__(self, content: bytes, path: str) -> None:
        self._path = path
        with _damage(path):
            fields = json.loads(content)
            self.arrays: Mapping[str, Fields] = _by_name(fields["arrays"], _key)
            self.objects: Mapping[str, Fields] = _by_name(fields["objects"], _unique_key)

    def array(self, key: str) -> ArrayRecord:
        """The array of a key that the part has."""
        with _damage(self._path):
            record = array_record(self.arrays[key])
            require_complete(record)
            return record

    def object(self, unique_key: str) -> ObjectRecord:
        """An object shard that the part has."""
        with _damage(self._path):
            return object_record(self.objects[unique_key])


@contextmanager
def _damage(path: str) -> Iterator[None]:
    """Turn what parsing raises into an error that names the file."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # PlanError, of a dtype that there is not, is a ValueError too.
        raise CorruptCheckpointError(
            f"{path} is no part of a manifest: {error!r}", path=path
        ) from error


def _by_name(listed: list[Fields], name_of: Callable[[Fields], str]) -> dict[str, Fields]:
    found = {name_of(fields): fields for fields in listed}
    if len(found) < len(listed):
        counts = Counter(map(name_of, listed))
        raise ValueError(f"{counts.most_common(1)[0][0]}: listed twice")
    return found


def _key(fields: Fields) -> str:
    key = fields["key"]
    if not isinstance(key, str):
        raise TypeError(f"{key!r}, expected a text")
    return key


def _unique_key(fields: Fields) -> str:
    return ObjectId(_key(fields), tuple(fields["offset"]), tuple(fields["shape"])).unique_key
