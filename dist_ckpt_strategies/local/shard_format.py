"""One rank's shard of a local checkpoint, and what its file holds."""

from __future__ import annotations

import json
import math
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy.typing as npt
import xxhash

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError

BASIC, MCORE, MEGATRON = "basic", "mcore", "megatron"
"""Kinds of states in shard files."""

RESHARDED_KINDS = frozenset({MCORE, MEGATRON})
"""Those whose shards another number of ranks can use."""

_ID = re.compile(r"iter_(\d{7,})_(\d+)_local_([0-9a-f]{1,64})")


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """One save of all ranks together; shards of two saves never mix.

    Sorted, the newest save comes last.

    Attributes:
        iteration: the training iteration that was saved.
        token: lower-case hexadecimal digits, led by the time of the save: a run that went back
            saves an iteration again, and its state may differ.
    """

    iteration: int
    token: str


@dataclass(frozen=True, slots=True, order=True)
class LocalShardId:
    """What one rank saved in one save.

    Attributes:
        save: the save it belongs to.
        global_rank: the rank whose state it is; any rank may hold a copy.
    """

    save: SaveId
    global_rank: int

    def __str__(self) -> str:
        """Such as ``iter_0000100_3_local_18f2…``: iteration, rank, token."""
        return f"iter_{self.save.iteration:07d}_{self.global_rank}_local_{self.save.token}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The id that has this text; None if it is none."""
        found = _ID.fullmatch(text)
        if found is None:
            return None
        shard = cls(SaveId(int(found[1]), found[3]), int(found[2]))
        return shard if str(shard) == text else None

    @classmethod
    def require(cls, text: str) -> Self:
        """The id that has this text.

        Raises:
            PlanError: it is none.
        """
        found = cls.parse(text)
        if found is None:
            raise PlanError(
                f"expected the id of a shard, such as iter_0000100_3_local_18f2, found {text!r}"
            )
        return found


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """The elements of one tensor or array of a shard.

    Attributes:
        name: where it stands in the state, for messages.
        dtype: type of its elements.
        shape: in elements.
        device: the kind of device that a tensor was on, ``cpu`` or ``cuda``; empty for what is
            no tensor, or belongs to an object.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    device: str = "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        found = self.dtype.itemsize
        for extent in self.shape:
            found *= extent
        return found


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard without its bytes.

    Attributes:
        shard_id: the save and the rank.
        world_size: ranks that took part in the save.
        session_id: the training session, as given to the manager.
        kind: of the state's class.
        content: of JSON types, for readers of the header alone: the common state, if it is such.
        buffers: the state's tensors in order, then those of its common state, then the state
            without its tensors, pickled.
    """

    shard_id: LocalShardId
    world_size: int
    session_id: str
    kind: str
    content: Any
    buffers: tuple[BufferSpec, ...]


MAGIC = b"DCKPART1"
PREFIX_NBYTES = 32

_BLOCK_NBYTES = 4096
_SMALL_ALIGNMENT = 64
_LARGE_NBYTES = 64 << 10
_FORMAT = "dist_ckpt_strategies part"
_VERSION = 2
_NUM_DIGITS = 16
_MAX_DESCRIPTION_NBYTES = 1 << 30
_MAX_WORLD_SIZE = 1 << 24
_MAX_EXTENT = 1 << 58
_MAX_NDIM = 64

Bytes = npt.NDArray[Any]

Digest = int
"""xxh3_64 of a buffer's bytes."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where everything of a shard is in its file.

    Attributes:
        header_nbytes: bytes before the first buffer.
        byte_offsets: where each buffer begins, in bytes from the start of the file.
        nbytes: size of the file.
    """

    header_nbytes: int
    byte_offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard as its header describes it.

    Attributes:
        shard: the shard without its bytes.
        digests: of each buffer.
        layout: where the buffers are.
    """

    shard: LocalShard
    digests: tuple[Digest, ...]
    layout: ShardLayout


def shard_layout(shard: LocalShard) -> ShardLayout:
    """Where everything of a shard goes."""
    return _layout(shard.buffers, len(_description(shard, (0,) * len(shard.buffers))))


def _layout(buffers: Sequence[BufferSpec], description_nbytes: int) -> ShardLayout:
    header_nbytes = end = _up(PREFIX_NBYTES + description_nbytes, _BLOCK_NBYTES)
    offsets: list[int] = []
    for buffer in buffers:
        is_large = buffer.nbytes >= _LARGE_NBYTES
        offsets.append(_up(end, _BLOCK_NBYTES if is_large else _SMALL_ALIGNMENT))
        end = offsets[-1] + buffer.nbytes
    return ShardLayout(header_nbytes, tuple(offsets), end)


def encode_header(shard: LocalShard, digests: Sequence[Digest]) -> bytes:
    """The bytes before the first buffer."""
    description = _description(shard, digests)
    start = MAGIC + struct.pack("<Q", len(description))
    found = start + xxhash.xxh3_128_digest(start + description) + description
    return found.ljust(_up(len(found), _BLOCK_NBYTES), b"\0")


def description_nbytes(prefix: bytes) -> int:
    """Size of the description, from the first 32 bytes of a file.

    Raises:
        CorruptCheckpointError: they are not those of a shard.
    """
    if len(prefix) < PREFIX_NBYTES or not prefix.startswith(MAGIC):
        raise CorruptCheckpointError(
            f"expected a local checkpoint, which starts with {MAGIC!r}, found {prefix[:8]!r}"
        )
    (found,) = struct.unpack("<Q", prefix[8:16])
    if found > _MAX_DESCRIPTION_NBYTES:
        raise CorruptCheckpointError(f"its header states a description of {found} bytes")
    return int(found)


def decode_header(content: bytes) -> StoredShard:
    """What the first bytes of a file describe.

    Args:
        content: the 32 bytes and the description, and nothing else.

    Raises:
        CorruptCheckpointError: its digest is another, or it is of another format.
    """
    description = content[PREFIX_NBYTES:]
    found = xxhash.xxh3_128_digest(content[:16] + description)
    if found != content[16:PREFIX_NBYTES] or len(description) != description_nbytes(content):
        raise CorruptCheckpointError(
            f"its header has digest {found.hex()}, expected {content[16:PREFIX_NBYTES].hex()}"
        )
    try:
        fields = json.loads(description)
        shard = shard_from_fields(fields)
        digests = tuple(int.from_bytes(bytes.fromhex(found)) for *_, found in fields["buffers"])
        return StoredShard(shard, digests, _layout(shard.buffers, len(description)))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"its header cannot be read: {type(error).__name__}: {error}"
        ) from error


def _description(shard: LocalShard, digests: Sequence[Digest]) -> bytes:
    fields = shard_to_fields(shard, digests)
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


def shard_to_fields(shard: LocalShard, digests: Sequence[Digest] | None = None) -> dict[str, Any]:
    """A shard in JSON types, for a file's header or for another rank."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "id": str(shard.shard_id),
        "world_size": shard.world_size,
        "session": shard.session_id,
        "kind": shard.kind,
        "buffers": [
            [b.name, b.dtype.value, list(b.shape), b.device, f"{digest:0{_NUM_DIGITS}x}"]
            for b, digest in zip(shard.buffers, digests or (0,) * len(shard.buffers), strict=True)
        ],
        "content": shard.content,
    }


def shard_from_fields(fields: Any) -> LocalShard:
    """The shard that ``shard_to_fields`` was given.

    Raises:
        ValueError: it is of another version.
    """
    found = fields["format"], fields["version"]
    if found != (_FORMAT, _VERSION):
        raise ValueError(
            f"format {found[0]!r} version {found[1]!r}, expected {_FORMAT!r} version {_VERSION}; "
            "load it with the release that wrote it"
        )
    (world_size,) = _counts([fields["world_size"]], _MAX_WORLD_SIZE)
    if world_size < 1:
        raise ValueError("expected a world of 1 rank or more")
    return LocalShard(
        LocalShardId.require(fields["id"]),
        world_size,
        fields["session"],
        fields["kind"],
        fields["content"],
        tuple(
            BufferSpec(name, DType(dtype), _counts(shape, _MAX_EXTENT), device)
            for name, dtype, shape, device, _ in fields["buffers"]
        ),
    )


def _counts(numbers: Any, most: int) -> tuple[int, ...]:
    """Numbers of a file that memory is asked for by, one after the other and all multiplied."""
    found = tuple(numbers)
    if any(type(number) is not int or number < 0 for number in found) or len(found) > _MAX_NDIM:
        raise ValueError(f"expected numbers of 0 or more, found {found[:_MAX_NDIM]!r}")
    if math.prod(number or 1 for number in found) > most:
        raise ValueError(f"expected at most {most} in all")
    return found


def _up(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment


class BufferDigests:
    """The digests of a file's buffers, taken while its bytes pass.

    Threads may share it, as long as the bytes of one buffer pass in order.
    """

    def __init__(self, shard: LocalShard, layout: ShardLayout) -> None:
        self._starts = layout.byte_offsets
        sizes = (buffer.nbytes for buffer in shard.buffers)
        self._ends = [start + size for start, size in zip(self._starts, sizes, strict=True)]
        self._digests: dict[int, Any] = {}

    def take(self, byte_offset: int, content: Bytes) -> None:
        """Bytes of the file pass; ``byte_offset`` is counted from its start."""
        stop = byte_offset + content.size
        first = bisect_right(self._ends, byte_offset)
        for number in range(first, bisect_left(self._starts, stop)):
            low, high = max(byte_offset, self._starts[number]), min(stop, self._ends[number])
            if low < high:
                digest = self._digests.setdefault(number, xxhash.xxh3_64())
                digest.update(content[low - byte_offset : high - byte_offset].data)

    def values(self) -> list[int]:
        """The digest of every buffer, once all has passed."""
        nothing = xxhash.xxh3_64()
        return [self._digests.get(n, nothing).intdigest() for n in range(len(self._ends))]
