"""Checkpoints of torch_dist, read box by box."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompatibleVersionError
from dist_ckpt_strategies.spec.conversion import SourceArray
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.conversion.source_facts import common_file, directory_identity
from dist_ckpt_strategies.storage.conversion.torch_archives import TensorArchive
from dist_ckpt_strategies.storage.conversion.torch_dist import METADATA_NAME, Stretch, read_index
from dist_ckpt_strategies.storage.disk.files import file_errors, read_file
from dist_ckpt_strategies.storage.format2.inner_codec import at_box
from dist_ckpt_strategies.storage.objects.embedded_common import beside_common, common_or_object
from dist_ckpt_strategies.storage.objects.pickled import Allowed, dump_content, load_pickle

_MAX_OPEN = 4096
"""Archives whose place and checksum are remembered, a few hundred bytes each."""


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
        return directory_identity(self.root, description, self.common_content())

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
        return common_file(self.root)


def _bits(elements: HostArray) -> np.dtype[np.void]:
    return np.dtype((np.void, elements.dtype.itemsize))


def _writer(name: str) -> int:
    """The rank that wrote a file, by its name; 0 where that does not say."""
    number = name.removeprefix("__").partition("_")[0]
    return int(number) if number.isdecimal() else 0
