"""One rank's shard of a local checkpoint, and the description that its file ends with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import xxhash

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.storage.file_systems import Bytes

if TYPE_CHECKING:  # torch takes a while to import
    import torch

END_NBYTES = 32
"""Digest and size of the description, and MAGIC: what a file ends with."""

MAGIC = b"DCKPART4"
_ALIGNMENT = 64
_MAX_WORLD_SIZE = 1 << 24
_MAX_SIZE = 1 << 58
_MAX_NDIM = 64

_TIME_DIGITS = 20
_ID = re.compile(r"iter_(\d{7,})_(\d+)_local_([0-9a-f]{1,64})")

Digest = int
"""xxh3_64 of a buffer's bytes."""


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """One save of all ranks together; shards of two saves never mix.

    Sorted, the newest save comes last. The stamp is of lower-case hexadecimal digits, led by the
    time of the save: a run that went back saves an iteration again, and its state may differ. After
    20 digits follows the id of the training, if there is one.
    """

    iteration: int
    stamp: str

    @property
    def training_id(self) -> str:
        """The id of the training that saved it; empty if there is none."""
        return self.stamp[_TIME_DIGITS:]


@dataclass(frozen=True, slots=True, order=True)
class LocalShardId:
    """What one rank saved in one save; any rank may hold a copy."""

    save: SaveId
    global_rank: int

    def __str__(self) -> str:
        """Such as ``iter_0000100_3_local_18f2…``: iteration, rank, stamp."""
        return f"iter_{self.save.iteration:07d}_{self.global_rank}_local_{self.save.stamp}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The id that has this text; None if it is none."""
        found = _ID.fullmatch(text)
        if found is None:
            return None
        shard = cls(SaveId(int(found[1]), found[3]), int(found[2]))
        return shard if str(shard) == text else None


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """The elements of one tensor of a shard; the name is its place in the state, for messages."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard without its bytes.

    ``session_id`` is that of the manager, ``kind`` that of the state's class. The buffers are the
    state's tensors in order, then the state without its tensors, pickled.
    """

    shard_id: LocalShardId
    world_size: int
    session_id: str
    kind: str
    buffers: tuple[BufferSpec, ...]

    @property
    def byte_offsets(self) -> tuple[int, ...]:
        """Where each buffer begins in the file."""
        offsets, end = [], 0
        for buffer in self.buffers:
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = offsets[-1] + buffer.nbytes
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the file up to the end of the last buffer."""
        return self.byte_offsets[-1] + self.buffers[-1].nbytes if self.buffers else 0

    def to_message(self) -> dict[str, Any]:
        """The shard as JSON types, for its file or for another rank."""
        return {
            "id": str(self.shard_id),
            "world_size": self.world_size,
            "session": self.session_id,
            "kind": self.kind,
            "buffers": [[b.name, b.dtype.value, list(b.shape)] for b in self.buffers],
        }

    @classmethod
    def from_message(cls, message: Any) -> LocalShard:
        """The shard that ``to_message`` described; a ValueError if the message makes no sense."""
        (world_size,) = _checked_counts([message["world_size"]], _MAX_WORLD_SIZE)
        shard_id = LocalShardId.parse(message["id"])
        if shard_id is None:
            raise ValueError(f"expected the id of a shard, found {message['id']!r}")
        return cls(
            shard_id,
            world_size,
            message["session"],
            message["kind"],
            tuple(
                BufferSpec(name, DType(dtype), _checked_counts(shape, _MAX_SIZE))
                for name, dtype, shape in message["buffers"]
            ),
        )


@dataclass(frozen=True, slots=True)
class FilledShard:
    """A rank's shard of a save with its bytes, which may be the state's own memory."""

    shard: LocalShard
    payloads: tuple[torch.Tensor, ...]


def _checked_counts(numbers: Any, most: int) -> tuple[int, ...]:
    """Numbers of a file that memory is asked for by, one after the other and all multiplied."""
    found = tuple(numbers)
    if any(type(number) is not int or number < 0 for number in found) or len(found) > _MAX_NDIM:
        raise ValueError(f"expected numbers of 0 or more, found {found[:_MAX_NDIM]!r}")
    if math.prod(number or 1 for number in found) > most:
        raise ValueError(f"expected at most {most} in all")
    return found


def encode_footer(shard: LocalShard, digests: Sequence[Digest]) -> bytes:
    """What a file has after its last buffer: the description, its digest, its size, MAGIC."""
    fields = {**shard.to_message(), "digests": [f"{digest:016x}" for digest in digests]}
    description = json.dumps(fields, separators=(",", ":")).encode()
    size = len(description).to_bytes(8, "little")
    return description + xxhash.xxh3_128_digest(description + size) + size + MAGIC


def footer_nbytes(end: bytes, file_nbytes: int) -> int:
    """Size of the footer, given a file's last 32 bytes; a CorruptCheckpointError if it has none."""
    if len(end) < END_NBYTES or not end.endswith(MAGIC):
        raise CorruptCheckpointError(
            f"expected a local checkpoint, which ends with {MAGIC!r} in this release, found "
            f"{end[-8:]!r}"
        )
    nbytes = int.from_bytes(end[-16:-8], "little") + END_NBYTES
    if nbytes > file_nbytes:
        raise CorruptCheckpointError(f"has {file_nbytes} bytes, and a description of {nbytes}")
    return nbytes


def decode_footer(content: bytes, file_nbytes: int) -> tuple[LocalShard, tuple[Digest, ...]]:
    """The shard that the footer of a file describes, and the digest of each buffer.

    A CorruptCheckpointError if the footer's own digest is another, or it makes no sense.
    """
    description, digest = content[:-END_NBYTES], content[-END_NBYTES:-16]
    found = xxhash.xxh3_128_digest(description + content[-16:-8])
    if found != digest:
        raise CorruptCheckpointError(
            f"its description has digest {found.hex()}, expected {digest.hex()}"
        )
    try:
        fields = json.loads(description)
        shard = LocalShard.from_message(fields)
        pairs = zip(fields["digests"], shard.buffers, strict=True)
        digests = tuple(int(text, 16) for text, _ in pairs)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"its description cannot be read: {type(error).__name__}: {error}"
        ) from error
    expected = shard.nbytes + len(content)
    if file_nbytes != expected:
        raise CorruptCheckpointError(f"has {file_nbytes} bytes, expected {expected}")
    return shard, digests


class BufferDigests:
    """The digests of a file's buffers, taken while its bytes pass, in order."""

    def __init__(self, shard: LocalShard) -> None:
        pairs = zip(shard.byte_offsets, shard.buffers, strict=True)
        self._ranges = [(start, start + buffer.nbytes) for start, buffer in pairs]
        self._digests = [xxhash.xxh3_64() for _ in self._ranges]
        self._num_complete = 0

    def take(self, byte_offset: int, content: Bytes) -> None:
        """The next bytes of the file pass; ``byte_offset`` is counted from its start."""
        stop = byte_offset + content.size
        for number in range(self._num_complete, len(self._ranges)):
            start, end = self._ranges[number]
            if start >= stop:
                break
            part = content[max(0, start - byte_offset) : end - byte_offset]
            self._digests[number].update(part.data)
            self._num_complete += end <= stop

    def values(self) -> list[Digest]:
        """The digest of every buffer, once all has passed."""
        return [digest.intdigest() for digest in self._digests]
