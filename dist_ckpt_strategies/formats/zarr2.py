"""The files of format ("zarr", 1): one Zarr v2 array in a directory per key, and objects.

TensorStore decodes chunks that are compressed, in Fortran order or big-endian. This package writes
none; other writers do.

Source: the Zarr v2 specification; checkpoints written by Megatron-Core 0.12.3 and 0.15.3.
"""

import json
import math
import operator
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import (
    UNKNOWN,
    ArraySpec,
    DType,
    ObjectId,
    Region,
    Shape,
    ShardSpec,
    require_storable_keys,
)
from dist_ckpt_strategies.core.blocks import OBJECT, BlockTable
from dist_ckpt_strategies.core.blocks import OBJECT_SUFFIX as KEY_SUFFIX
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Directory,
    file_errors,
    new_file,
    sync_path,
    write_vector,
)
from dist_ckpt_strategies.storage.folders import is_directory
from dist_ckpt_strategies.storage.host import begin_writeback
from dist_ckpt_strategies.storage.io_pool import Deadline, Job, Transfer
from dist_ckpt_strategies.storage.store import Bytes, HostArray

METADATA_NAME = ".zarray"
OBJECT_SUFFIX = ".pt"
LOCKS_SUFFIX = ".sync"
"""Megatron-Core <= 0.15 kept locks of the array ``w`` in ``w.sync``, one empty file each."""


def dtype_name(dtype: DType) -> str:
    """The dtype as ``.zarray`` spells it: ``<f4``, ``|b1``, and plain names for extensions."""
    return dtype.value if dtype.is_extension else dtype.numpy.newbyteorder("<").str


@lru_cache(maxsize=256)
def metadata_content(shape: Shape, chunk_shape: Shape, dtype: DType) -> bytes:
    """The bytes of ``.zarray``: the fields that Megatron-Core <= 0.15 wrote, laid out as by zarr 2.

    The arrays of all layers have few descriptions between them, and indented JSON takes its time.
    """
    fields = {
        "chunks": chunk_shape,
        "compressor": None,
        "dtype": dtype_name(dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": shape,
        "zarr_format": 2,
    }
    return json.dumps(fields, indent=4).encode()


def parse_metadata(key: str, path: Path | str, content: bytes) -> ArraySpec:
    """The array that a ``.zarray`` file describes.

    Raises:
        CorruptCheckpointError: not JSON, or not the description of an array.
        PlanError: a dtype that torch has no counterpart for.
    """
    try:
        return replace(_parsed(content), key=key)
    except PlanError as error:
        reason = error.message.removeprefix(": ")
        raise PlanError(f"{key}: {path}: {reason}", key=key, path=str(path)) from error
    except (ValueError, LookupError, TypeError, SyntaxError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{key}: {path} does not describe a Zarr v2 array: {error!r}", key=key, path=str(path)
        ) from error


@lru_cache(maxsize=256)
def _parsed(content: bytes) -> ArraySpec:
    """The array without a key; the arrays of all layers have few descriptions between them."""
    fields = json.loads(content)
    spelled, order = str(fields["dtype"]), fields["order"]
    dtype = next((member for member in DType if dtype_name(member) == spelled), None)
    if dtype is None:
        if spelled[:1] not in set("<>|"):
            raise ValueError(f"dtype {spelled!r}, expected one such as '<f4'")
        dtype = DType.named(np.dtype(spelled).name, key="")
    shape, chunks = _shape(fields["shape"], least=0), _shape(fields["chunks"], least=1)
    separator = str(fields.get("dimension_separator", "."))
    if fields["zarr_format"] != 2:  # noqa: PLR2004 - the format's own number
        raise ValueError(f"zarr_format {fields['zarr_format']}, expected 2")
    if len(shape) != len(chunks):
        raise ValueError(f"shape {shape} with chunks {chunks}")
    if order not in {"C", "F"} or separator not in {".", "/"}:
        raise ValueError(f"order {order!r}, dimension_separator {separator!r}")
    codecs = [c for c in (fields["compressor"], *(fields.get("filters") or ())) if c is not None]
    if not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in codecs):
        raise ValueError("a compressor or filter that is neither null nor has an id")
    is_raw = not codecs and order == "C" and (spelled[0] in "<|" or dtype.is_extension)
    return ArraySpec("", shape, dtype, chunks, separator, is_raw=is_raw)


def _shape(numbers: Any, *, least: int) -> Shape:
    """Sizes of an array or chunk; JSON could hold anything in their place."""
    if not isinstance(numbers, list) or any(type(n) is not int or n < least for n in numbers):
        raise ValueError(f"{numbers!r}, expected a list of whole numbers, each at least {least}")
    return tuple(numbers)


def lock_directories(root: Path, key: str) -> Iterator[str]:
    """The directory beside an array that Megatron-Core <= 0.15 kept locks in, if there is."""
    if _is_lock_directory(f"{root}/{key}{LOCKS_SUFFIX}"):
        yield key + LOCKS_SUFFIX


def array_keys(root: Path) -> Iterator[str]:
    """Keys of all arrays below a checkpoint directory, at any depth; an array may be a link."""
    for key, entry in entries_below(root):
        if not is_directory(entry) or _is_lock_directory(entry.path):
            continue
        if os.path.exists(os.path.join(entry.path, METADATA_NAME)):  # noqa: PTH110, PTH118 - 10,000 times
            yield key


def entries_below(directory: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below a checkpoint directory, each with its path there, sorted by names.

    Links, and checkpoints further down, are not looked into.
    """
    with file_errors(prefix, directory):
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    for entry in entries:
        if not entry.name.startswith((REMOVED_PREFIX, PARTIAL_PREFIX)):
            yield prefix + entry.name, entry
            if is_directory(entry) and not is_elsewhere(entry):
                yield from entries_below(Path(entry.path), f"{prefix}{entry.name}/")


def _is_lock_directory(path: str) -> bool:
    """Whether it holds an array's locks: a file for each of the array's, ``.zarray`` included."""
    if not path.endswith(LOCKS_SUFFIX):
        return False
    try:
        return os.stat(os.path.join(path, METADATA_NAME)).st_size == 0  # noqa: PTH116, PTH118
    except OSError:  # also where the longer name is too long
        return False


def decode_chunk(root: Path, array: ArraySpec, index: Shape, region: Region) -> HostArray:
    """The elements of a region, of the array, in one chunk.

    Raises:
        CorruptCheckpointError: the chunk cannot be decoded.
        StorageError: TensorStore has no decoder for it, or cannot read it.
    """
    directory = root / array.key
    if array.chunk_nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise StorageError(  # TensorStore would end the process
            f"{array.key}: {directory / METADATA_NAME} states chunks of {array.chunk_nbytes} "
            "bytes, more than this machine has memory to decode",
            key=array.key,
            path=str(directory / METADATA_NAME),
        )
    with tensorstore_errors(array.key, f"{root}/{array.chunk_file(index)}"):
        opened = open_tensorstore("zarr", directory)
        return np.asarray(opened[region.slices()].read().result())


def open_tensorstore(driver: str, path: Path, **fields: Any) -> Any:
    """TensorStore's array at a place; it reads no chunk that is missing as zeros."""
    import tensorstore as ts  # noqa: PLC0415 - takes a while, and few arrays need it

    plain = Path("/", *path.resolve().parts[1:])  # with one leading slash
    place = {"driver": "file", "path": str(plain)}
    spec = {"driver": driver, "kvstore": place, "fill_missing_data_reads": False, **fields}
    return ts.open(spec).result()


_KINDS: Mapping[str, type[StorageError]] = MappingProxyType(
    {
        "NOT_FOUND": IncompleteCheckpointError,
        "DATA_LOSS": CorruptCheckpointError,
        "INVALID_ARGUMENT": CorruptCheckpointError,
        "FAILED_PRECONDITION": CorruptCheckpointError,
    }
)


@contextmanager
def tensorstore_errors(
    key: str, path: Path | str, kinds: Mapping[str, type[StorageError]] = _KINDS
) -> Iterator[None]:
    """Within the block TensorStore's errors are of this package: of these kinds, by their codes."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        text = str(error).partition(" [tensorstore_spec")[0]
        kind = kinds.get(text.partition(":")[0], StorageError)
        if "is not registered" in text or "filters are not supported" in text:
            kind = StorageError
            text = f"TensorStore has no decoder; rewrite the array with zarr-python ({text})"
        raise kind(f"{key}: {path}: {text}", key=key, path=str(path)) from error


# Objects


def object_name(name: ObjectId) -> str:
    """The file of a shard of an object."""
    return f"{name.unique_key}{OBJECT_SUFFIX}"


def object_ids(root: Path) -> Iterator[ObjectId]:
    """Every object shard below a checkpoint, sorted; names of the older form are completed.

    An older name lacks the last number of the grid's shape: it is one more than the largest
    offset found, as Megatron-Core concludes.
    """
    by_key: dict[str, list[ObjectId]] = {}
    for path, _ in entries_below(root):
        if object_id := shard_id(path):
            by_key.setdefault(object_id.key, []).append(object_id)
    for key in sorted(by_key):
        last = max(object_id.offset[-1] for object_id in by_key[key]) + 1
        for object_id in sorted(by_key[key]):
            shape = object_id.shape
            if shape[-1] == UNKNOWN:
                shape = (*shape[:-1], last)
            yield ObjectId(key, object_id.offset, shape)


def shard_id(path: str) -> ObjectId | None:
    """The shard in a file of that path below a checkpoint; None where the name is none of a shard.

    The last number of the shape is UNKNOWN in a name of the older form.
    """
    if not path.endswith(OBJECT_SUFFIX):
        return None
    object_id = ObjectId.parse(path.removesuffix(OBJECT_SUFFIX))
    return object_id if object_id and object_name(object_id) == path else None


def object_path(root: Path, object_id: ObjectId) -> Path:
    """The file of a shard that ``object_ids`` yielded."""
    path = root / object_name(object_id)
    older = root / object_name(replace(object_id, shape=(*object_id.shape[:-1], UNKNOWN)))
    return path if path.exists() or not older.exists() else older


# Written, a file for each chunk: a shard as it is saved, so that nothing is sent between ranks


NewFile = tuple[str, str, Bytes]
"""A file to be written: the key that it is of, its name below the checkpoint, its bytes."""


def chunk_name(key: str, origin: Shape, extent: Shape) -> str:
    """The file of the chunk that begins at an element, of an array of such chunks."""
    numbers = [start // max(1, size) for start, size in zip(origin, extent, strict=True)]
    return f"{key}/{'.'.join(map(str, numbers)) or '0'}"


def require_on_grid(shards: Collection[ShardSpec], objects: Collection[ObjectId]) -> None:
    """Raise a PlanError where a rank's own shards show that the format cannot hold them."""
    extents: dict[str, Shape] = {}
    for shard in shards:
        _require_chunk(extents, shard.key, shard.region, "")
    for name in objects:
        if not name.shape:
            raise PlanError(
                f"{name.key}: a shard of an object on a grid without dims, which format ('zarr', 1)"
                " has no file name for; give it one dim, or save ('safetensors', 1)",
                key=name.key,
            )
    require_storable_keys({shard.key for shard in shards}, {name.key for name in objects})


def require_grids(tables: Sequence[BlockTable], global_ranks: Sequence[int]) -> None:
    """Raise a PlanError unless all shards of each array, of all ranks, are chunks of one grid."""
    extents: dict[str, Shape] = {}
    keys: dict[bool, set[str]] = {True: set(), False: set()}
    for table, rank in zip(tables, global_ranks, strict=True):
        for key, facts in zip(table.keys, table.facts, strict=True):
            keys[facts.dtype == OBJECT].add(key.removesuffix(KEY_SUFFIX))
        for row, array in enumerate(table.array.tolist()):
            _require_chunk(extents, table.keys[array], table.region(row), f" on rank {rank}")
    require_storable_keys(keys[False], keys[True])


def _require_chunk(extents: dict[str, Shape], key: str, region: Region, where: str) -> None:
    """Raise unless a region is a chunk of the grid that the first one of its array is in."""
    if 0 in region.shape:
        return
    chunk = extents.setdefault(key, region.shape)
    if region.shape != chunk or any(map(operator.mod, region.offset, chunk)):
        raise PlanError(
            f"{key}: {region}{where} is no chunk of a regular grid of chunks {chunk}, as other "
            "shards are, which format ('zarr', 1) needs; save ('safetensors', 1), which stores any",
            key=key,
        )


def metadata_files(shards: Iterable[ShardSpec]) -> Iterator[NewFile]:
    """The descriptions of arrays, each written by the rank that holds the first element."""
    seen = set()
    for shard in shards:
        offset, extent = shard.region
        is_empty = 0 in shard.array_shape
        if any(offset) or (0 in extent and not is_empty) or shard.key in seen:
            continue
        seen.add(shard.key)
        chunk = shard.array_shape if is_empty else extent
        content = metadata_content(
            shard.array_shape, tuple(max(1, size) for size in chunk), shard.dtype
        )
        yield shard.key, f"{shard.key}/{METADATA_NAME}", np.frombuffer(content, np.uint8)


def write_files(
    store: Directory, files: Sequence[NewFile], num_threads: int, deadline: Deadline
) -> None:
    """Write new files, on threads; they are durable once ``sync_files`` returns.

    Raises:
        StorageError: one cannot be written; names key and file.
    """

    def write(name: str, content: Bytes) -> None:
        path = store.path(name)
        with file_errors(None, path), new_file(path, is_flushed=False) as handle:
            write_vector(handle, [content])
            begin_writeback(handle, 0, 0)  # all of it, while others are written

    jobs = [
        Job(key, store.path(name), partial(write, name, content)) for key, name, content in files
    ]
    Transfer(jobs, num_threads).wait(deadline.left_s)


def sync_files(
    store: Directory, names: Iterable[tuple[str, str]], num_threads: int, deadline: Deadline
) -> None:
    """Make files durable, given by key and name, and then their names.

    After all are written: a file system that keeps a journal flushes much of it with the first.
    """
    files = {store.path(name): key for key, name in names}
    folders: dict[str, str] = {}
    for path, key in files.items():
        folder = path.rpartition("/")[0]
        while len(folder) >= len(str(store.root)) and folder not in folders:
            folders[folder] = key
            folder = folder.rpartition("/")[0]
    for paths in (files, folders):
        jobs = [Job(key, path, partial(sync_path, path)) for path, key in paths.items()]
        Transfer(jobs, num_threads).wait(deadline.left_s)


def expected_files(table: BlockTable) -> Iterator[tuple[str, int | None]]:
    """Each file that a rank writes that has told this, with its size if that is known."""
    itemsizes = [1 if f.dtype == OBJECT else DType(f.dtype).itemsize for f in table.facts]
    for row, array in enumerate(table.array.tolist()):
        (origin, extent), key, facts = table.region(row), table.keys[array], table.facts[array]
        if facts.dtype == OBJECT:
            name = ObjectId(key.removesuffix(KEY_SUFFIX), origin, facts.shape)
            yield object_name(name), None
            continue
        if 0 not in extent:
            yield chunk_name(key, origin, extent), math.prod(extent) * itemsizes[array]
        if not any(origin):
            yield f"{key}/{METADATA_NAME}", None


def write_chunks(
    store: Directory,
    chunks: Sequence[tuple[str, str]],
    others: Sequence[NewFile],
    num_threads: int,
    timeout_s: float,
    contents: Iterable[Iterable[Sequence[Bytes]]],
) -> tuple[()]:
    """Write chunks, by key and name, and other files, durably. Rank-local.

    ``contents`` are those of the chunks, in order; empty ones have no file. ``timeout_s`` is the
    longest wait for the storage.

    Raises:
        StorageError: one cannot be written.
    """
    deadline, left = Deadline.after(timeout_s), iter(chunks)
    for batch in chain.from_iterable(contents):
        filled = [content for content in batch if content.size]
        files = [(*next(left), content) for content in filled]
        write_files(store, files, num_threads, deadline)
    write_files(store, others, num_threads, deadline)
    sync_files(store, [*chunks, *(file[:2] for file in others)], num_threads, deadline)
    return ()


def is_elsewhere(directory: os.DirEntry[str] | Path) -> bool:
    """Whether a directory is no part of the checkpoint around it: a link, or another checkpoint.

    One that was not finished counts too.
    """
    names = (MARKER_NAME, COMMON_NAME)
    return directory.is_symlink() or any(
        os.path.exists(os.path.join(directory, name))  # noqa: PTH110, PTH118 - never raises
        for name in names
    )
