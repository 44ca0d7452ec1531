"""One rank's part of a local checkpoint, and what its file holds."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import xxhash

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError

_ID = re.compile(r"iter_(\d{7,})_(\d+)_local_([0-9a-f]{1,64})")


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """One save of all ranks together; parts of two saves never mix.

    Sorted, the newest save comes last.

    Attributes:
        iteration: the training iteration that was saved.
        token: lower-case hexadecimal digits, led by the time of the save: a run that went back
            saves an iteration again, and its state may differ.
    """

    iteration: int
    token: str


@dataclass(frozen=True, slots=True, order=True)
class PartId:
    """What one rank saved in one save.

    Attributes:
        save: the save it belongs to.
        global_rank: the rank whose state it is, whoever keeps the copy.
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
        part = cls(SaveId(int(found[1]), found[3]), int(found[2]))
        return part if str(part) == text else None

    @classmethod
    def require(cls, text: str) -> Self:
        """The id that has this text.

        Raises:
            PlanError: it is none.
        """
        found = cls.parse(text)
        if found is None:
            raise PlanError(
                f"expected the id of a part, such as iter_0000100_3_local_18f2, found {text!r}"
            )
        return found


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """The elements of one tensor or array of a part.

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
class Part:
    """A part without its bytes.

    Attributes:
        part_id: the save and the rank.
        world_size: ranks that took part in the save.
        session_id: the training session, as the manager was told.
        kind: of the state's class.
        content: of JSON types, for readers of the header alone: the common state, if it is such.
        buffers: the state's tensors in order, then those of its common state, then the state
            without its tensors, pickled.
    """

    part_id: PartId
    world_size: int
    session_id: str
    kind: str
    content: Any
    buffers: tuple[BufferSpec, ...]


MAGIC = b"DCKPART1"
PREFIX_NBYTES = 32
BLOCK_NBYTES = 4096

_SMALL_ALIGNMENT = 64
_LARGE_NBYTES = 64 << 10
_FORMAT = "dist_ckpt_strategies part"
_VERSION = 2
_NUM_DIGITS = 16
_MAX_DESCRIPTION_NBYTES = 1 << 30
_MAX_WORLD_SIZE = 1 << 24
_MAX_NDIM = 64
_MAX_ELEMENTS = 1 << 58
_DIGEST = re.compile(rf"[0-9a-f]{{{_NUM_DIGITS}}}")

Digest = int
"""xxh3_64 of a buffer's bytes."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Where everything of a part is in its file.

    Attributes:
        header_nbytes: bytes before the first buffer.
        byte_offsets: where each buffer begins, in bytes from the start of the file.
        nbytes: size of the file.
    """

    header_nbytes: int
    byte_offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part as its header describes it.

    Attributes:
        part: the part without its bytes.
        digests: of each buffer.
        layout: where the buffers are.
    """

    part: Part
    digests: tuple[Digest, ...]
    layout: PartLayout


def part_layout(part: Part) -> PartLayout:
    """Where everything of a part goes."""
    return _layout(part.buffers, len(_description(part, _no_digests(part))))


def _layout(buffers: Sequence[BufferSpec], description_nbytes: int) -> PartLayout:
    header_nbytes = _up(PREFIX_NBYTES + description_nbytes, BLOCK_NBYTES)
    offsets: list[int] = []
    end = header_nbytes
    for buffer in buffers:
        large = buffer.nbytes >= _LARGE_NBYTES
        start = _up(end, BLOCK_NBYTES if large else _SMALL_ALIGNMENT)
        offsets.append(start)
        end = start + buffer.nbytes
    return PartLayout(header_nbytes, tuple(offsets), end)


def encode_header(part: Part, digests: Sequence[Digest]) -> bytes:
    """The bytes before the first buffer."""
    found = encode_description(part, digests)
    return found + bytes(_up(len(found), BLOCK_NBYTES) - len(found))


def encode_description(part: Part, digests: Sequence[Digest]) -> bytes:
    """The header without the zeros at its end; what ``decode_header`` takes."""
    description = _description(part, digests)
    start = MAGIC + struct.pack("<Q", len(description))
    return start + xxhash.xxh3_128_digest(start + description) + description


def description_nbytes(prefix: bytes) -> int:
    """Size of the description, from the first 32 bytes of a file.

    Raises:
        CorruptCheckpointError: they are not those of a part.
    """
    if len(prefix) < PREFIX_NBYTES or not prefix.startswith(MAGIC):
        raise CorruptCheckpointError(
            f"expected a local checkpoint, which starts with {MAGIC!r}, found {prefix[:8]!r}"
        )
    (found,) = struct.unpack("<Q", prefix[8:16])
    if found > _MAX_DESCRIPTION_NBYTES:
        raise CorruptCheckpointError(f"its header states a description of {found} bytes")
    return int(found)


def decode_header(content: bytes) -> StoredPart:
    """What the first bytes of a file describe.

    Args:
        content: the 32 bytes and the description, and nothing else.

    Raises:
        CorruptCheckpointError: its digest is another, or it is not what ``encode_header`` makes.
    """
    description = content[PREFIX_NBYTES:]
    found = xxhash.xxh3_128_digest(content[:16] + description)
    if found != content[16:PREFIX_NBYTES] or len(description) != description_nbytes(content):
        raise CorruptCheckpointError(
            f"its header has digest {found.hex()}, expected {content[16:PREFIX_NBYTES].hex()}"
        )
    try:
        return _stored(json.loads(description), len(description))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"its header cannot be read: {type(error).__name__}: {error}"
        ) from error


def part_to_wire(part: Part) -> bytes:
    """The header without digests of the buffers, for a peer."""
    return encode_description(part, _no_digests(part))


def part_from_wire(content: bytes) -> Part:
    """The part that ``part_to_wire`` described.

    Raises:
        CorruptCheckpointError: it did not arrive as it was, or cannot be read.
    """
    try:
        return decode_header(content).part
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"a peer's description of its part cannot be used: {error.message}"
        ) from error


def _no_digests(part: Part) -> Sequence[Digest]:
    return (0,) * len(part.buffers)


def _description(part: Part, digests: Sequence[Digest]) -> bytes:
    buffers = [
        [b.name, b.dtype.value, list(b.shape), b.device, f"{digest:0{_NUM_DIGITS}x}"]
        for b, digest in zip(part.buffers, digests, strict=True)
    ]
    fields = {
        "format": _FORMAT,
        "version": _VERSION,
        "id": str(part.part_id),
        "world_size": part.world_size,
        "session": part.session_id,
        "kind": part.kind,
        "buffers": buffers,
        "content": part.content,
    }
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


def _stored(fields: Any, description_nbytes: int) -> StoredPart:
    if fields["format"] != _FORMAT or fields["version"] != _VERSION:
        raise ValueError(
            f"format {fields['format']!r} version {fields['version']!r}, expected {_FORMAT!r} "
            f"{_VERSION}"
        )
    part_id = PartId.parse(fields["id"])
    if part_id is None:
        raise ValueError(f"id {fields['id']!r}")
    buffers = tuple(
        BufferSpec(str(name), DType(dtype), _shape(shape), str(device))
        for name, dtype, shape, device, _ in fields["buffers"]
    )
    part = Part(
        part_id,
        _world_size(fields["world_size"]),
        str(fields["session"]),
        str(fields["kind"]),
        fields["content"],
        buffers,
    )
    digests = tuple(_digest(digest) for *_, digest in fields["buffers"])
    return StoredPart(part, digests, _layout(buffers, description_nbytes))


def _extent(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"expected a number of elements, found {number!r}")
    return number


def _shape(extents: Any) -> tuple[int, ...]:
    """A shape that memory could be asked for; extents next to a 0 are bounded too."""
    found = tuple(map(_extent, extents))
    if len(found) > _MAX_NDIM or math.prod(extent or 1 for extent in found) > _MAX_ELEMENTS:
        raise ValueError(f"expected a shape that fits in memory, found {len(found)} dims")
    return found


def _world_size(number: Any) -> int:
    if not 1 <= _extent(number) <= _MAX_WORLD_SIZE:
        raise ValueError("expected a number of ranks")
    return int(number)


def _digest(text: Any) -> Digest:
    if _DIGEST.fullmatch(text) is None:
        raise ValueError(f"expected a digest of {_NUM_DIGITS} digits")
    return int(text, 16)


def _up(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment
