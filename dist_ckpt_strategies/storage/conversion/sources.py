"""Checkpoints of any format, as a conversion or a comparison reads them: box by box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.spec.conversion import SourceArray
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.conversion.safetensors_source import INDEX_NAME, SafetensorsSource
from dist_ckpt_strategies.storage.conversion.torch_source import TorchDistSource
from dist_ckpt_strategies.storage.conversion.zarr_sources import Format1Source, Format2Source
from dist_ckpt_strategies.storage.disk.files import MARKER_NAME
from dist_ckpt_strategies.storage.locations import Location, read_marker
from dist_ckpt_strategies.storage.objects.pickled import Allowed


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


def is_of_safetensors(root: Path) -> bool:
    """Whether a directory holds whole files of safetensors, and no checkpoint."""
    return (root / INDEX_NAME).exists() and not (root / MARKER_NAME).exists()


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
    if isinstance(root, Path) and is_of_safetensors(root):
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
