"""The description of a torch_dist checkpoint: ``.metadata``, a pickle, read without unpickling it.

Every class that the pickle may name stands in a list here, and none of them is made: what comes out
is inert. What is written are torch's own classes, as its reader wants them.

Source: torch.distributed.checkpoint.metadata and .filesystem; Megatron-Core 0.16.1.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompatibleVersionError,
    PlanError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Extent, Region
from dist_ckpt_strategies.storage.disk.files import file_errors, read_file

METADATA_NAME = ".metadata"

_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = frozenset(
    {
        *(
            (f"{_CHECKPOINT}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(
            (f"{_CHECKPOINT}.planner", name)
            for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)
"""The classes and functions that torch's and Megatron-Core's writers leave in the pickle."""

_PLAIN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
}


class _Record:
    """Whatever the pickle says of an object: what it was made from, and its fields."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state
        fields = state[1] if isinstance(state, tuple) and state[:1] == (None,) else state
        if isinstance(fields, dict):
            self.__dict__.update(fields)

    def __hash__(self) -> int:
        return id(self)


class _Unpickler(pickle.Unpickler):
    """Makes records, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and name in _TORCH_DTYPES:
            return name
        raise UnsafeObjectError(f"{module}.{name}")


_TORCH_DTYPES = frozenset(member.value for member in DType)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file of torch_dist: what ``torch.save`` wrote of one thing."""

    name: str
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TorchDistArray:
    """An array of torch_dist.

    Attributes:
        key: its name.
        shape: in elements.
        dtype: of its elements.
        pieces: where each of its boxes lies.
    """

    key: str
    shape: Extent
    dtype: DType
    pieces: tuple[tuple[Region, Stretch], ...]


@dataclass(frozen=True, slots=True)
class TorchDistIndex:
    """What ``.metadata`` lists: arrays and objects, by key."""

    arrays: Mapping[str, TorchDistArray]
    objects: Mapping[str, Stretch]


def read_index(root: Path) -> TorchDistIndex:
    """What a checkpoint of torch_dist holds.

    Raises:
        IncompleteCheckpointError: ``.metadata`` is missing.
        CorruptCheckpointError: it describes no checkpoint.
        UnsafeObjectError: it names a class that torch's and Megatron-Core's writers do not use.
        IncompatibleVersionError: its arrays are in a form that this package does not read.
    """
    path = root / METADATA_NAME
    with file_errors(None, path):
        content = read_file(path)
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        _require_plain_arrays(found, path)
        return _index(found)
    except UnsafeObjectError as error:
        raise UnsafeObjectError(
            f"{path} names {error.message}, which no description of a checkpoint needs",
            path=str(path),
        ) from error
    except (IncompatibleVersionError, PlanError):
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path} is damaged: it describes no checkpoint ({type(error).__name__}: {error})",
            path=str(path),
        ) from error


def _require_plain_arrays(found: Any, path: Path) -> None:
    """Raise where arrays were stored in another shape than their own."""
    reshaped = {
        key: told
        for key, told in (getattr(found, "mcore_data", None) or {}).items()
        if "nd_reformulated_orig_global_shape" in told
    }
    if reshaped:
        raise IncompatibleVersionError(
            f"{path}: {min(reshaped)} and {len(reshaped) - 1} more arrays went through flattened "
            "ranges of Megatron-Core <= 0.15, which torch_dist keeps in another shape; save with "
            "the fully_reshardable or dp_reshardable optimizer format, or with ('zarr', 1)"
        )


def _index(found: Any) -> TorchDistIndex:
    pieces: dict[str, list[tuple[Extent, Stretch]]] = collections.defaultdict(list)
    objects: dict[str, Stretch] = {}
    for index, info in found.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise IncompatibleVersionError(
                f"{index.fqn}: stored through {info.transform_descriptors}, which this package "
                "does not read",
                key=index.fqn,
            )
        stretch = Stretch(_file_name(info.relative_path), int(info.offset), int(info.length))
        if getattr(index, "offset", None) is None:
            objects[index.fqn] = stretch
        else:
            pieces[index.fqn].append((tuple(map(int, index.offset)), stretch))
    arrays = {}
    for key, stored in found.state_dict_metadata.items():
        if hasattr(stored, "chunks"):
            arrays[key] = _array(key, stored, dict(pieces[key]))
        elif key not in objects:
            raise ValueError(f"{key}: no file holds it")
    return TorchDistIndex(arrays, {key: objects[key] for key in sorted(objects)})


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or "/" in name or name in {"", ".", ".."}:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return name


def _array(key: str, stored: Any, by_offset: Mapping[Extent, Stretch]) -> TorchDistArray:
    dtype = DType.named(str(stored.properties.state[0]), key=key)
    pieces = []
    for chunk in stored.chunks:
        region = Region(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
        if region.offset not in by_offset:
            raise ValueError(f"{key}: no file holds {region}")
        pieces.append((region, by_offset[region.offset]))
    return TorchDistArray(key, tuple(map(int, stored.size)), dtype, tuple(sorted(pieces, key=_at)))


def _at(piece: tuple[Region, Stretch]) -> Region:
    return piece[0]


def index_content(
    pieces: Iterable[tuple[ArraySpec, Region, Stretch]],
    objects: Iterable[tuple[str, Stretch]],
) -> bytes:
    """The bytes of ``.metadata``.

    Args:
        pieces: every box of every array.
        objects: every shard of every object, by its unique key.
    """
    import torch  # noqa: PLC0415 - tools that only look need not wait for it
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    files: dict[Any, Any] = {}
    for array, region, stretch in pieces:
        if array.key not in described:
            properties = TensorProperties(dtype=getattr(torch, array.dtype.value))
            described[array.key] = TensorStorageMetadata(properties, torch.Size(array.shape), [])
        chunks = described[array.key].chunks
        chunks.append(ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape)))
        index = MetadataIndex(array.key, torch.Size(region.offset), len(chunks) - 1)
        files[index] = _StorageInfo(stretch.name, stretch.byte_offset, stretch.nbytes)
    for key, stretch in objects:
        described[key] = BytesStorageMetadata()
        files[MetadataIndex(key)] = _StorageInfo(stretch.name, stretch.byte_offset, stretch.nbytes)
    return pickle.dumps(Metadata(state_dict_metadata=described, storage_data=files))
