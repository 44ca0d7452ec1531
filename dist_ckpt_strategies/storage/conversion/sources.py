"""Checkpoints of any format, as a conversion or a comparison reads them: box by box."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
)
from dist_ckpt_strategies.spec.array import ArraySpec, array_to_wire
from dist_ckpt_strategies.spec.conversion import SourceArray
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.base import ArrayRead, HostArray
from dist_ckpt_strategies.storage.buckets.place import Bucket
from dist_ckpt_strategies.storage.checkpoints import Format1Checkpoint, Format2Checkpoint
from dist_ckpt_strategies.storage.conversion.safetensors_source import INDEX_NAME, SafetensorsSource
from dist_ckpt_strategies.storage.conversion.torch_archives import TensorArchive
from dist_ckpt_strategies.storage.conversion.torch_dist import METADATA_NAME, Stretch, read_index
from dist_ckpt_strategies.storage.disk.files import (
    COMMON_NAME,
    MARKER_NAME,
    file_errors,
    read_file,
    storage_error,
)
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.format2.inner_codec import at_box
from dist_ckpt_strategies.storage.format2.manifest import INDEX_NAME as MANIFEST_INDEX_NAME
from dist_ckpt_strategies.storage.format2.manifest import SAVE_NAME, digest_of
from dist_ckpt_strategies.storage.locations import Location, read_marker
from dist_ckpt_strategies.storage.objects.embedded_common import beside_common, common_or_object
from dist_ckpt_strategies.storage.objects.pickled import (
    Allowed,
    archive_damage,
    dump_content,
    load_pickle,
    object_ids,
)

_MAX_OPEN = 4096
"""Archives whose place and checksum are remembered, a few hundred bytes each."""


class Source(Protocol):
    """A finished checkpoint. Any thread may read."""

    @property
    def root(self) -> Location:
        """Its directory, absolute, or its place in an object store."""
        ...

    @property
    def marker(self) -> CheckpointMarker:
        """Which formats it uses."""
        ...

    @property
    def arrays(self) -> Sequence[SourceArray]:
        """All arrays, sorted by key."""
        ...

    @property
    def objects(self) -> Sequence[ObjectId]:
        """All shards of objects, sorted; not one that stands for the file of the common state."""
        ...

    @property
    def identity(self) -> str:
        """A digest that changes when the checkpoint is saved anew."""
        ...

    @property
    def layout(self) -> Mapping[str, int]:
        """Parallel sizes of the job that saved, as far as they are recorded."""
        ...

    def read(self, key: str, region: Region, target: HostArray) -> None:
        """Fill ``target``, which is in C order and of the region's shape.

        Verified as far as the format has digests of what is read.

        Raises:
            StorageError: it is missing or damaged, or cannot be read.
        """
        ...

    def object_content(self, object_id: ObjectId) -> bytes:
        """One shard of an object, for ``load_content``; errors as in ``read``."""
        ...

    def common_content(self) -> bytes:
        """The file of the common state, or that of the object which holds it.

        Raises:
            IncompleteCheckpointError: there is neither.
            CorruptCheckpointError: it is damaged.
        """
        ...


def open_source(root: Location, options: Options, allow: Allowed) -> Source:
    """The finished checkpoint at a place.

    Args:
        root: the directory, absolute, or a place in an object store.
        options: how to read, and what to verify.
        allow: classes that objects of torch_dist may be unpickled to: they are kept in lists.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is none.
        IncompatibleVersionError: it is of a format that this package does not read, or not from
            there.
    """
    if (
        isinstance(root, Path)
        and (root / INDEX_NAME).exists()
        and not (root / MARKER_NAME).exists()
    ):
        return SafetensorsSource(root)
    marker = read_marker(root)
    backend = (marker.sharded_backend, marker.sharded_backend_version)
    common = (marker.common_backend, marker.common_backend_version)
    if common != ("torch", 1):
        raise IncompatibleVersionError(
            f"{root}: common state of format {common}, this package reads ('torch', 1)"
        )
    if backend == ("zarr", 2):
        return Format2Source(root, marker, options)
    if isinstance(root, Bucket):
        raise IncompatibleVersionError(
            f"{root}: format {backend}; from an object store only ('zarr', 2) is read"
        )
    if backend == ("zarr", 1):
        return Format1Source(root, marker, options)
    if backend == ("torch_dist", 1):
        return TorchDistSource(root, marker, allow)
    raise IncompatibleVersionError(
        f"{root}: format {backend}; expected ('zarr', 1), ('zarr', 2) or ('torch_dist', 1)"
    )


class Format1Source:
    """A checkpoint of format ("zarr", 1); see Source. Arrays have no digests, objects have."""

    def __init__(self, root: Path, marker: CheckpointMarker, options: Options) -> None:
        self.root, self.marker = root, marker
        self._options = options
        self._checkpoint = Format1Checkpoint(root, options)
        self._reader = self._checkpoint.array_reader

    @cached_property
    def _found(self) -> dict[str, ArraySpec]:
        return self._checkpoint.find(list(Zarr2Layout(self.root).keys()))

    @cached_property
    def arrays(self) -> Sequence[SourceArray]:
        """See Source."""
        return tuple(_on_grid(array) for array in self._found.values())

    @cached_property
    def objects(self) -> Sequence[ObjectId]:
        """See Source."""
        return beside_common(self._common_file, self._all_objects)

    @cached_property
    def _all_objects(self) -> Sequence[ObjectId]:
        return tuple(object_ids(self.root))

    @cached_property
    def identity(self) -> str:
        """See Source."""
        wires = [array_to_wire(array) for array in self._found.values()]
        return _identity(self.root, json.dumps(wires).encode(), self.common_content())

    @property
    def layout(self) -> Mapping[str, int]:
        """See Source."""
        return {}

    def read(self, key: str, region: Region, target: HostArray) -> None:
        """See Source."""
        read = ArrayRead(self._found[key], region, target)
        self._reader.begin_reads([read]).wait(self._options.timeout_s)

    def object_content(self, object_id: ObjectId) -> bytes:
        """See Source."""
        content = self._checkpoint.object_content(object_id)
        path = self._checkpoint.object_path(object_id)
        _require_archive(content, object_id.unique_key, path)
        return content

    def common_content(self) -> bytes:
        """See Source."""
        return common_or_object(self._common_file, self._all_objects, self.object_content)

    def _common_file(self) -> bytes:
        return _common(self.root)


class Format2Source:
    """A checkpoint of format ("zarr", 2); see Source. Everything has a digest."""

    def __init__(self, root: Location, marker: CheckpointMarker, options: Options) -> None:
        self.root, self.marker = root, marker
        self._options = options
        self._checkpoint = Format2Checkpoint(root, options)
        self._reader = self._checkpoint.array_reader
        self._parsing = threading.Lock()

    @cached_property
    def arrays(self) -> Sequence[SourceArray]:
        """See Source."""
        return tuple(_on_grid(record.array) for record in self._checkpoint.manifest.arrays())

    @cached_property
    def objects(self) -> Sequence[ObjectId]:
        """See Source."""
        return beside_common(self._common_file, self._all_objects)

    @cached_property
    def _all_objects(self) -> Sequence[ObjectId]:
        return tuple(sorted(record.id for record in self._checkpoint.manifest.objects()))

    @cached_property
    def identity(self) -> str:
        """See Source."""
        place = self._checkpoint.place
        description = place.read(MANIFEST_INDEX_NAME)
        if isinstance(self.root, Path):
            return _identity(self.root, description, self.common_content())
        published = digest_of(place.read(SAVE_NAME))
        return _digest_of_all(description, self.common_content(), [str(self.root), published])

    @property
    def layout(self) -> Mapping[str, int]:
        """See Source."""
        return self._checkpoint.manifest.index.layout

    def read(self, key: str, region: Region, target: HostArray) -> None:
        """See Source."""
        with self._parsing:
            array = self._checkpoint.manifest.find(key).array
        transfer = self._reader.begin_reads([ArrayRead(array, region, target)])
        transfer.wait(self._options.timeout_s)

    def object_content(self, object_id: ObjectId) -> bytes:
        """See Source."""
        return self._checkpoint.object_content(object_id)

    def common_content(self) -> bytes:
        """See Source."""
        return common_or_object(self._common_file, self._all_objects, self.object_content)

    def _common_file(self) -> bytes:
        self._checkpoint.require_common()
        place = self._checkpoint.place
        content = place.read(COMMON_NAME)
        _require_archive(content, "common state", place.path(COMMON_NAME))
        return content


class TorchDistSource:
    """A checkpoint of torch_dist; see Source. Its archives hold a CRC-32 of each piece."""

    def __init__(self, root: Path, marker: CheckpointMarker, allow: Allowed) -> None:
        self.root, self.marker = root, marker
        self._allow = allow
        self._index = read_index(root)
        self._archives: OrderedDict[Stretch, TensorArchive] = OrderedDict()
        self._remembering = threading.Lock()

    @cached_property
    def arrays(self) -> Sequence[SourceArray]:
        """See Source."""
        found = []
        for key, array in sorted(self._index.arrays.items()):
            pieces = tuple((region, _writer(stretch.name)) for region, stretch in array.pieces)
            found.append(SourceArray(key, array.shape, array.dtype, None, pieces))
        return tuple(found)

    @cached_property
    def objects(self) -> Sequence[ObjectId]:
        """See Source."""
        return beside_common(self._common_file, self._all_objects)

    @cached_property
    def _all_objects(self) -> Sequence[ObjectId]:
        found = []
        for key in self._index.objects:
            object_id = ObjectId.parse(key)
            if object_id is None:
                raise IncompatibleVersionError(
                    f"{key}: {self.root} holds this value under a name that is none of a "
                    "ShardedObject; Megatron-Core 0.16 did not write it",
                    key=key,
                )
            found.append(object_id)
        return tuple(sorted(found))

    @cached_property
    def identity(self) -> str:
        """See Source."""
        path = self.root / METADATA_NAME
        with file_errors(None, path):
            description = read_file(path)
        return _identity(self.root, description, self.common_content())

    @property
    def layout(self) -> Mapping[str, int]:
        """See Source."""
        return {}

    def read(self, key: str, region: Region, target: HostArray) -> None:
        """See Source. A piece's checksum is compared when the first box of it is read."""
        array = self._index.arrays[key]
        for piece, stretch in array.pieces:
            common = piece.intersect(region)
            if common is None:
                continue
            archive = self._archive(key, array.dtype.value, piece, stretch)
            part = at_box(target, common.within(region))
            if part.flags.c_contiguous:
                archive.read(common.within(piece), part)
                continue
            copy = np.empty(common.shape, part.dtype)
            archive.read(common.within(piece), copy)
            np.copyto(part.view(_bits(part)), copy.view(_bits(copy)))

    def _archive(self, key: str, dtype: str, piece: Region, stretch: Stretch) -> TensorArchive:
        with self._remembering:
            archive = self._archives.get(stretch)
        if archive is not None:
            return archive
        path = f"{self.root}/{stretch.name}"
        archive = TensorArchive.open(path, key, stretch.byte_offset, stretch.nbytes)
        found = (archive.layout.dtype, archive.layout.shape)
        if found != (dtype, piece.shape):
            raise CorruptCheckpointError(
                f"{key}: {path} holds {found[0]} {found[1]} at byte {stretch.byte_offset}, "
                f"expected {dtype} {piece.shape}",
                key=key,
                path=path,
            )
        with self._remembering:
            self._archives[stretch] = archive
            if len(self._archives) > _MAX_OPEN:
                self._archives.popitem(last=False)
        return archive

    def object_content(self, object_id: ObjectId) -> bytes:
        """See Source. torch_dist keeps each in a list of one."""
        name = object_id.unique_key
        stretch = self._index.objects[name]
        path = f"{self.root}/{stretch.name}"
        with file_errors(name, path), open(path, "rb", 0) as file:  # noqa: PTH123
            file.seek(stretch.byte_offset)
            content = file.read(stretch.nbytes)
        found = load_pickle(content, path, name, self._allow)
        if not isinstance(found, list) or len(found) != 1:
            raise CorruptCheckpointError(
                f"{name}: {path} holds a {type(found).__name__} at byte {stretch.byte_offset}, "
                "expected a list of one object",
                key=name,
                path=path,
            )
        return dump_content(found[0], name=name)

    def common_content(self) -> bytes:
        """See Source."""
        return common_or_object(self._common_file, self._all_objects, self.object_content)

    def _common_file(self) -> bytes:
        return _common(self.root)


def _bits(elements: HostArray) -> np.dtype[np.void]:
    return np.dtype((np.void, elements.dtype.itemsize))


def _writer(name: str) -> int:
    """The rank that wrote a file, by its name; 0 where that does not say."""
    number = name.removeprefix("__").partition("_")[0]
    return int(number) if number.isdecimal() else 0


def _on_grid(array: ArraySpec) -> SourceArray:
    return SourceArray(
        array.key, array.shape, array.dtype, array.chunk_shape, grain=array.inner_shape
    )


def _common(root: Path) -> bytes:
    path = root / COMMON_NAME
    with file_errors(None, path, not_found=IncompleteCheckpointError):
        content = read_file(path)
    _require_archive(content, "common state", str(path))
    return content


def _require_archive(content: bytes, name: str, path: str) -> None:
    damage = archive_damage(content)
    if damage:
        raise CorruptCheckpointError(f"{name}: {path} is damaged: {damage}", key=name, path=path)


def _identity(root: Path, description: bytes, common: bytes) -> str:
    """A digest of what describes the arrays, the common state, and when it was published."""
    path = root / MARKER_NAME
    try:
        published = path.stat().st_mtime_ns
    except OSError as error:
        raise storage_error(None, path, error) from error
    facts = [str(root), published, asdict(read_marker(root))]
    return _digest_of_all(description, common, facts)


def _digest_of_all(description: bytes, common: bytes, facts: list[Any]) -> str:
    parts: Iterable[bytes] = (
        description,
        digest_of(common).encode(),
        json.dumps(facts).encode(),
    )
    return digest_of(b"".join(digest_of(part).encode() for part in parts))
