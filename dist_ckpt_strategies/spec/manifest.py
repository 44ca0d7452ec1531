"""What the manifest of a format 2 checkpoint says about its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Extent

DIGEST_NBYTES = 8


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The file of one chunk.

    Attributes:
        writer: global rank that wrote it.
        digests: XXH3 of each inner chunk in the order of the file, then of its index; 8 bytes
            each, big-endian.
    """

    writer: int
    digests: bytes

    @classmethod
    def of(cls, writer: int, digests: list[int]) -> ChunkRecord:
        """The record with these digests."""
        return cls(writer, b"".join(d.to_bytes(DIGEST_NBYTES, "big") for d in digests))

    @property
    def num_digests(self) -> int:
        """How many there are, that of the index included."""
        return len(self.digests) // DIGEST_NBYTES

    def digest(self, number: int) -> int:
        """The digest of an inner chunk; the last one is that of the index."""
        at = DIGEST_NBYTES * number
        return int.from_bytes(self.digests[at : at + DIGEST_NBYTES], "big")


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """An array and its files.

    Attributes:
        array: what is stored.
        chunks: the file of each chunk, by its index in the chunk grid.
    """

    array: ArraySpec
    chunks: Mapping[Extent, ChunkRecord]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that holds several objects.

    Attributes:
        name: of the file, below the checkpoint's directory.
        byte_offset: where they begin.
        nbytes: how many there are.
        digest: XXH3, 128 bits, in hexadecimal.
    """

    name: str
    byte_offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One shard of an object.

    Attributes:
        id: which.
        writer: global rank that wrote it.
        span: where its pickled form lies; None for a plain value.
        value: the object itself, where JSON holds it exactly and ``span`` is None.
    """

    id: ObjectId
    writer: int
    span: Span | None
    value: Any = None


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One file of the manifest, as its table of contents lists it.

    Attributes:
        name: of the file, below the checkpoint's directory.
        first: the first key in it; it ends before the first key of the next.
        nbytes: its size.
        digest: XXH3 of the file, 128 bits, in hexadecimal.
        num_arrays: arrays in it.
        num_objects: object shards in it.
    """

    name: str
    first: str
    nbytes: int
    digest: str
    num_arrays: int
    num_objects: int


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file that is read whole.

    Attributes:
        nbytes: its size.
        digest: XXH3, 128 bits, in hexadecimal.
    """

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ManifestIndex:
    """The manifest's table of contents.

    Attributes:
        parts: its files, by their first keys.
        common: the common state's file; None where there was none at the time of the save.
        layout: parallel sizes of the job that saved, by name, and its number of ranks.
        versions: of the packages that took part, by name.
    """

    parts: tuple[PartEntry, ...]
    common: FileDigest | None
    layout: Mapping[str, int]
    versions: Mapping[str, str]
