"""``.metadata`` of torch_dist, a pickle that says which files hold which arrays and objects.

It is read by an unpickler that makes inert records of the classes that torch's and Megatron-Core's
writers use, and refuses all others. What is written are torch's own classes.

Source: torch.distributed.checkpoint.metadata; Megatron-Core 0.16.1.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompatibleVersionError,
    PlanError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.storage.files import file_errors, read_file

METADATA_NAME = ".metadata"

_RECORD_MODULES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "megatron.core.dist_checkpointing.",
    "pathlib",
)
_PLAIN = MappingProxyType({("collections", "OrderedDict"): dict, ("torch", "Size"): tuple})
_DTYPES = frozenset(member.value for member in DType)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file: what ``torch.save`` wrote of one thing."""

    name: str
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array and where each of its shards lies."""

    shape: Shape
    dtype: DType
    shards: tuple[tuple[Region, Span], ...]


class _Record:
    """Whatever the pickle says of an object: its fields, and nothing that runs."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state
        fields = state[1] if isinstance(state, tuple) and state[:1] == (None,) else state
        if isinstance(fields, dict):
            self.__dict__.update(fields)

    def __hash__(self) -> int:
        return id(self)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes records, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and name in _DTYPES:
            return name
        is_known = f"{module}.".startswith(_RECORD_MODULES) and "." not in name
        if is_known or (module, name) == ("torch.serialization", "_get_layout"):
            return type(name, (_Record,), {})
        raise UnsafeObjectError(f"{module}.{name}")


def read_metadata(path: Path) -> tuple[dict[str, StoredArray], dict[str, Span]]:
    """The arrays and the objects that ``.metadata`` lists, by key.

    Raises:
        IncompleteCheckpointError: it is missing.
        CorruptCheckpointError: it describes no checkpoint.
        UnsafeObjectError: it names a class that torch's and Megatron-Core's writers do not use.
        IncompatibleVersionError: its arrays are in a form that this package does not read.
    """
    with file_errors(None, path):
        content = read_file(path)
    try:
        found = _MetadataUnpickler(io.BytesIO(content)).load()
        _require_own_shapes(found, path)
        return _parsed_metadata(found)
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


def _require_own_shapes(found: Any, path: Path) -> None:
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


def _parsed_metadata(found: Any) -> tuple[dict[str, StoredArray], dict[str, Span]]:
    shards: dict[str, dict[Shape, Span]] = collections.defaultdict(dict)
    objects: dict[str, Span] = {}
    for index, info in found.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise IncompatibleVersionError(
                f"{index.fqn}: stored through {info.transform_descriptors}, which this package "
                "does not read",
                key=index.fqn,
            )
        name = info.relative_path
        if not isinstance(name, str) or "/" in name or name in {"", ".", ".."}:
            raise ValueError(f"{name!r} is no file of a checkpoint")
        span = Span(name, int(info.offset), int(info.length))
        if getattr(index, "offset", None) is None:
            objects[index.fqn] = span
        else:
            shards[index.fqn][extent_of(index.offset)] = span
    arrays = {}
    for key, stored in found.state_dict_metadata.items():
        if hasattr(stored, "chunks"):
            arrays[key] = _stored_array(key, stored, shards[key])
        elif key not in objects:
            raise ValueError(f"{key}: no file holds it")
    return arrays, objects


def _stored_array(key: str, stored: Any, spans: Mapping[Shape, Span]) -> StoredArray:
    dtype = DType.named(str(stored.properties.state[0]), key=key)
    shards = {}
    for chunk in stored.chunks:
        region = Region(extent_of(chunk.offsets), extent_of(chunk.sizes))
        if region.offset not in spans:
            raise ValueError(f"{key}: no file holds {region}")
        shards[region] = spans[region.offset]
    return StoredArray(
        extent_of(stored.size), dtype, tuple((region, shards[region]) for region in sorted(shards))
    )


def extent_of(numbers: Iterable[Any]) -> Shape:
    """Numbers that a pickle holds, as sizes or offsets."""
    return tuple(map(int, numbers))


def metadata_content(
    shards: Iterable[tuple[ArraySpec, Region, Span]], objects: Mapping[str, Span]
) -> bytes:
    """The bytes of ``.metadata``: torch's own classes, as its reader wants them.

    Args:
        shards: of all arrays.
        objects: every shard of every object, by its unique key.
    """
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
    for array, region, span in shards:
        if array.key not in described:
            properties = TensorProperties(dtype=getattr(torch, array.dtype.value))
            described[array.key] = TensorStorageMetadata(properties, torch.Size(array.shape), [])
        chunks = described[array.key].chunks
        chunks.append(ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape)))
        index = MetadataIndex(array.key, torch.Size(region.offset), len(chunks) - 1)
        files[index] = _StorageInfo(span.name, span.byte_offset, span.nbytes)
    for key, span in objects.items():
        described[key] = BytesStorageMetadata()
        files[MetadataIndex(key)] = _StorageInfo(span.name, span.byte_offset, span.nbytes)
    return pickle.dumps(Metadata(state_dict_metadata=described, storage_data=files))
