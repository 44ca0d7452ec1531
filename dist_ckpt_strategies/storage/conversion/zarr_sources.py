"""Checkpoints of formats ("zarr", 1) and ("zarr", 2), read box by box."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.spec.array import ArraySpec, array_to_wire
from dist_ckpt_strategies.spec.conversion import SourceArray
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.base import ArrayRead, HostArray
from dist_ckpt_strategies.storage.checkpoints import Format1Checkpoint, Format2Checkpoint
from dist_ckpt_strategies.storage.conversion.source_facts import (
    common_file,
    digest_of_all,
    directory_identity,
    require_archive,
)
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.format2.manifest import INDEX_NAME as MANIFEST_INDEX_NAME
from dist_ckpt_strategies.storage.format2.manifest import SAVE_NAME, digest_of
from dist_ckpt_strategies.storage.locations import Location
from dist_ckpt_strategies.storage.objects.embedded_common import beside_common, common_or_object
from dist_ckpt_strategies.storage.objects.pickled import object_ids


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
        return directory_identity(self.root, json.dumps(wires).encode(), self.common_content())

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
        require_archive(content, object_id.unique_key, path)
        return content

    def common_content(self) -> bytes:
        """See Source."""
        return common_or_object(self._common_file, self._all_objects, self.object_content)

    def _common_file(self) -> bytes:
        return common_file(self.root)


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
        file_store = self._checkpoint.file_store
        description = file_store.read(MANIFEST_INDEX_NAME)
        if isinstance(self.root, Path):
            return directory_identity(self.root, description, self.common_content())
        published = digest_of(file_store.read(SAVE_NAME))
        return digest_of_all(description, self.common_content(), [str(self.root), published])

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
        file_store = self._checkpoint.file_store
        content = file_store.read(COMMON_NAME)
        require_archive(content, "common state", file_store.path(COMMON_NAME))
        return content


def _on_grid(array: ArraySpec) -> SourceArray:
    return SourceArray(
        array.key, array.shape, array.dtype, array.chunk_shape, grain=array.inner_shape
    )
