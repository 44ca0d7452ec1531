"""Checkpoints of torch_dist, as torch.distributed.checkpoint and Megatron-Core write them.

``.metadata`` is a pickle that says where in which ``.distcp`` files the shards of arrays and the
objects lie, each as ``torch.save`` wrote it. It is unpickled with an allow-list of torch's and
Megatron-Core's description classes; the shards and objects with ``weights_only=True``.

Source: torch.distributed.checkpoint; Megatron-Core 0.16.1.
"""

import io
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId, Region
from dist_ckpt_strategies.device import as_tensor, to_host, torch_dtype
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint, found_among
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, dump_object, load_content
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    file_errors,
    new_file,
    read_file,
    write_vector,
)
from dist_ckpt_strategies.storage.io_pool import Transfer
from dist_ckpt_strategies.storage.store import ArrayRead, HostArray
from dist_ckpt_strategies.tools.plan_convert import FileTask
from dist_ckpt_strategies.tools.writers import Objects, Read, Target

METADATA_NAME = ".metadata"

_ALLOWED = {
    "collections": {"OrderedDict"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch": {"Size", *(member.value for member in DType)},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
}
"""The classes in a description of a checkpoint, by module."""

_OTHER_SHAPE = "nd_reformulated_orig_global_shape"
"""In Megatron-Core's description of an array that was stored in another shape than its own."""

_ONE_OBJECT = "a list of one object"

_Span = tuple[str, int, int]
"""Name of a file, first byte and number of bytes of what ``torch.save`` wrote of one thing."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what describes a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "PosixPath" and module in {"pathlib", "pathlib._local"}:
            return PurePosixPath
        if name not in _ALLOWED.get(module, ()):
            raise UnsafeObjectError(f"{module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> tuple[dict[str, ArraySpec], dict[MetadataIndex, _Span]]:
    """The arrays by key, and where each shard and object lies."""
    with file_errors(None, path):
        content = read_file(path)
    try:
        return _parsed(_MetadataUnpickler(io.BytesIO(content)).load(), path)
    except UnsafeObjectError as error:
        raise UnsafeObjectError(
            f"{path} names {error.message}, which no description of a checkpoint needs",
            path=str(path),
        ) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path} is damaged: it describes no checkpoint ({type(error).__name__}: {error})",
            path=str(path),
        ) from error


def _parsed(metadata: Any, path: Path) -> tuple[dict[str, ArraySpec], dict[MetadataIndex, _Span]]:
    described = getattr(metadata, "mcore_data", None) or {}
    reshaped = [key for key, more in described.items() if _OTHER_SHAPE in more]
    if reshaped:
        raise IncompatibleVersionError(
            f"{path}: {min(reshaped)} and {len(reshaped) - 1} more arrays went through flattened "
            "ranges of Megatron-Core <= 0.15, which torch_dist keeps in another shape; save with "
            "the fully_reshardable or dp_reshardable optimizer format, or with ('zarr', 1)"
        )
    spans = {index: _span(index, info) for index, info in metadata.storage_data.items()}
    arrays = {}
    for key, stored in sorted(metadata.state_dict_metadata.items()):
        if not isinstance(stored, TensorStorageMetadata):
            spans[MetadataIndex(key)]  # a KeyError where no file holds the object
            continue
        regions = {Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks}
        shards = tuple(
            (region, _writer(spans[MetadataIndex(key, region.offset)][0]))
            for region in sorted(regions)
        )
        dtype, shape = DType.named(str(stored.properties.dtype), key=key), tuple(stored.size)
        chunk = tuple(max(1, size) for size in shape)
        arrays[key] = ArraySpec(key, shape, dtype, chunk, blocks=shards)
    return arrays, spans


def _span(index: MetadataIndex, info: Any) -> _Span:
    if getattr(info, "transform_descriptors", None):
        raise IncompatibleVersionError(
            f"{index.fqn}: stored through {info.transform_descriptors}, which this package "
            "does not read",
            key=index.fqn,
        )
    name = info.relative_path
    if not isinstance(name, str) or "/" in name or name in {"", ".", ".."}:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return name, int(info.offset), int(info.length)


class TorchDistCheckpoint(Format1Checkpoint):
    """A checkpoint of torch_dist that can be read; see Format1Checkpoint.

    ``torch.save`` leaves a CRC-32 of each shard, which is compared. Each thread holds the shard
    that it has read last. Objects may be unpickled to the classes of ``allow``: they are in lists.
    """

    def __init__(self, root: Path, options: Options, allow: Allowed) -> None:
        super().__init__(root, options)
        self._allow = allow
        self._arrays, self._spans = _read_metadata(root / METADATA_NAME)
        self._bounds: dict[str, npt.NDArray[np.int64]] = {}
        self._last = threading.local()

    def keys(self) -> Iterator[str]:
        """See Format1Checkpoint."""
        return iter(self._arrays)

    def find(self, keys: Iterable[str]) -> Mapping[str, ArraySpec]:
        """See Format1Checkpoint."""
        return found_among(self._arrays, keys, self._root)

    def object_ids(self) -> Iterator[ObjectId]:
        """See Format1Checkpoint."""
        for index in self._spans:
            if index.offset is not None:
                continue
            object_id = ObjectId.parse(index.fqn)
            if object_id is None:
                raise IncompatibleVersionError(
                    f"{index.fqn}: {self._root} holds this value under a name that is none of a "
                    "ShardedObject; Megatron-Core 0.16 did not write it",
                    key=index.fqn,
                )
            yield object_id

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """Read regions of arrays, on this thread, whose shard it is; all is done on return."""
        for read in reads:
            bits = np.dtype((np.void, read.target.dtype.itemsize))
            for shard in self._shards_in(read.array.key, read.region):
                common = shard.intersect(read.region)
                if common is not None:
                    place: Any = (..., *common.within(shard).slices())
                    part: Any = (..., *common.within(read.region).slices())
                    elements = self._elements(read.array, shard)[place]
                    np.copyto(read.target[part].view(bits), elements.view(bits))
        return Transfer((), 0)

    def _shards_in(self, key: str, region: Region) -> Iterator[Region]:
        """The shards of an array that lie in a region, out of as many as ranks and experts make."""
        shards = self._arrays[key].blocks or ()
        if key not in self._bounds:
            bounds = np.array([(shard.offset, shard.end) for shard, _ in shards], np.int64)
            self._bounds[key] = bounds.reshape(len(shards), 2, region.ndim)
        begins, ends = self._bounds[key].swapaxes(0, 1)
        for number in np.flatnonzero(((begins < region.end) & (ends > region.offset)).all(axis=1)):
            yield shards[number][0]

    def _elements(self, array: ArraySpec, shard: Region) -> HostArray:
        """The elements of a shard; those that this thread has read last are held."""
        if getattr(self._last, "place", None) != (array.key, shard):
            self._last.place = self._last.elements = None  # before there is a second one
            expected = f"torch.{array.dtype.value} {shard.shape}"
            shard_loaded = self._loaded(array.key, MetadataIndex(array.key, shard.offset), expected)
            (self._last.elements,) = to_host([shard_loaded])
            self._last.place = array.key, shard
        elements: HostArray = self._last.elements
        return elements

    def object_path(self, object_id: ObjectId) -> str:
        """See Format1Checkpoint."""
        return f"{self._root}/{self._spans[MetadataIndex(object_id.unique_key)][0]}"

    def object_content(self, object_id: ObjectId) -> bytes:
        """See Format1Checkpoint. torch_dist keeps each in a list of one."""
        name = object_id.unique_key
        (value,) = self._loaded(name, MetadataIndex(name), _ONE_OBJECT)
        return dump_object(value, name=name)

    def _loaded(self, key: str, index: MetadataIndex, expected: str) -> Any:
        """The value that ``torch.save`` wrote of a shard or an object."""
        name, byte_offset, nbytes = self._spans[index]
        path = f"{self._root}/{name}"
        with file_errors(key, path):
            content = read_file(path, nbytes, byte_offset)
        value = load_content(content, path, key, self._allow)
        if isinstance(value, torch.Tensor):
            actual = f"{value.dtype} {tuple(value.shape)}"
        else:
            is_one = isinstance(value, list) and len(value) == 1
            actual = _ONE_OBJECT if is_one else f"a {type(value)}"
        if actual != expected:
            text = f"{key}: {path} holds {actual} at byte {byte_offset}, expected {expected}"
            raise CorruptCheckpointError(text, key=key, path=path)
        return value


def _writer(name: str) -> int:
    """The rank that wrote a file, by its name; 0 where that does not say."""
    number = name.removeprefix("__").partition("_")[0]
    return int(number) if number.isdecimal() else 0


def write_torch_dist(target: Target, task: FileTask, read: Read) -> list[list[Any]]:
    """See ``Write``. Gives item, offset, shape and end in the file of each shard.

    A shard larger than a block is cut.
    """
    shards: list[list[Any]] = []
    path = target.files.path(task.name)
    with (
        file_errors(task.key, path),
        new_file(path) as handle,
        open(handle, "wb", closefd=False) as file,
    ):
        for number, item in enumerate(task.items):
            for block in item.blocks(target.block_nbytes):
                tensor = as_tensor(target.block(item, block, read), item.array.dtype)
                try:
                    torch.save(tensor, file)
                except RuntimeError as error:  # raised while it ends what it could not write
                    raise error.__context__ or error from None
                shards.append([number, block.offset, block.shape, file.tell()])
    return shards


def finish_torch_dist(
    target: Target, records: Mapping[int, Any], objects: Objects, common: bytes
) -> None:
    """See ``Finish``. Objects are unpickled, because each goes into a list."""
    arrays = {
        array.key: TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(array.dtype)), torch.Size(array.shape), []
        )
        for array in target.plan.arrays
    }
    metadata = Metadata({**arrays}, storage_data={})
    for number, shards in sorted(records.items()):
        task, start = target.plan.tasks[number], 0
        for item, offset, shape, end in shards:
            key = task.items[item].array.key
            chunks = arrays[key].chunks
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
            index = MetadataIndex(key, torch.Size(offset), len(chunks) - 1)
            metadata.storage_data[index] = _StorageInfo(task.name, start, end - start)
            start = end
    name = f"__0_{len(target.plan.tasks)}.distcp"
    path, byte_offset = target.files.path(name), 0
    with file_errors(None, path), new_file(path) as handle:
        for object_id, content in objects:
            key = object_id.unique_key
            value = load_content(content, path, key, target.allow)
            dumped = dump_loadable([value], name=key, allow=target.allow)
            write_vector(handle, [np.frombuffer(dumped, np.uint8)])
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
            info = _StorageInfo(name, byte_offset, len(dumped))
            metadata.storage_data[MetadataIndex(key)] = info
            byte_offset += len(dumped)
    target.files.write(COMMON_NAME, common)
    target.files.write(METADATA_NAME, pickle.dumps(metadata))
