"""What the bytes of checkpoint files are, by the pages of the formats; nothing of the package."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from tests.faults.oracle import CopyKey, Place, SaveKey

_INDEX_ENTRY_NBYTES = 16
_CRC_NBYTES = 4


class Kind(StrEnum):
    """What a file of format 2, or a byte of it, is."""

    MARKER = "metadata.json"
    COMMON = "common.pt"
    INDEX = "manifest/index.json"
    PART = "manifest/part"
    SAVE = "manifest/save.json"
    PACK = "objects"
    ZARR = "zarr.json"
    CHUNK = "chunk"
    CHUNK_INDEX = "chunk's index"


class Fault(StrEnum):
    """What is done to files."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    DELETE = "delete"
    EXTEND = "extend"
    SWAP = "swap"


_FOR_OTHERS = "for readers without this package; a load takes shapes from the manifest"
_OF_THE_BEGIN = "says when the save began; nothing reads it in a finished checkpoint"
_ANY = tuple(Fault)

HARMLESS: Mapping[tuple[Fault, Kind], str] = {
    (fault, kind): why
    for kind, faults, why in (
        (Kind.ZARR, _ANY, _FOR_OTHERS),
        (Kind.SAVE, _ANY, _OF_THE_BEGIN),
        (Kind.CHUNK_INDEX, (Fault.FLIP,), _FOR_OTHERS),
        (Kind.PACK, (Fault.EXTEND,), "objects are read by where they begin and end"),
    )
    for fault in faults
}
"""What a load need not notice, and why. Of the marker also what JSON says is nothing."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint of format 2: their content by name below ``root``."""

    root: Path
    contents: Mapping[str, bytes]

    @classmethod
    def below(cls, root: Path) -> Files:
        """Those of a finished checkpoint."""
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return cls(root, {str(path.relative_to(root)): path.read_bytes() for path in paths})

    def of_kind(self, kind: Kind) -> list[str]:
        """The names of the files of a kind."""
        return [name for name in self.contents if kind_of_file(name) is kind]

    def any_byte(self, chance: random.Random) -> tuple[str, int]:
        """A file, by size, of all or of a kind so that all are hit; and a byte of it."""
        kinds = [kind for kind in Kind if any(self.contents[one] for one in self.of_kind(kind))]
        kind = chance.choice([None, Kind.CHUNK_INDEX, *kinds])
        if kind is Kind.CHUNK_INDEX and Kind.CHUNK in kinds:
            name = chance.choice(self.of_kind(Kind.CHUNK))
            return name, chance.randrange(self.index_start(name), len(self.contents[name]))
        names = self.of_kind(kind) if kind in kinds else list(self.contents)
        (name,) = chance.choices(names, [len(self.contents[one]) for one in names])
        return name, chance.randrange(len(self.contents[name]))

    def kind_at(self, name: str, byte_offset: int) -> Kind:
        """What a byte is."""
        kind = kind_of_file(name)
        is_index = kind is Kind.CHUNK and byte_offset >= self.index_start(name)
        return Kind.CHUNK_INDEX if is_index else kind

    def index_start(self, name: str) -> int:
        """Where the index of a chunk's file begins."""
        metadata = json.loads(self.contents[f"{name.rpartition('/')[0]}/zarr.json"])
        chunk = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        inner = metadata["codecs"][0]["configuration"]["chunk_shape"]
        count: int = math.prod(c // i for c, i in zip(chunk, inner, strict=True))
        return len(self.contents[name]) - count * _INDEX_ENTRY_NBYTES - _CRC_NBYTES


def kind_of_file(name: str) -> Kind:
    """What a file is, by its name."""
    folder, _, base = name.rpartition("/")
    if base == "zarr.json":
        return Kind.ZARR
    if folder.startswith("arrays/"):
        return Kind.CHUNK
    if folder == "objects":
        return Kind.PACK
    if base.startswith("part-"):
        return Kind.PART
    return Kind(name)


_ALIGNMENT = 64
_END = 32
_COPY = re.compile(r"iter_(\d+)_(\d+)_local_([0-9a-f]+)\.part")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a local shard file that are one thing."""

    start: int
    end: int
    place: Place


def file_map(content: bytes) -> tuple[Span, ...]:
    """What each byte of a local shard file is."""
    last = len(content) - _END
    first = last - int.from_bytes(content[-16:-8], "little")
    end = 0
    spans = []
    for _, dtype, shape in json.loads(content[first:last])["buffers"]:
        nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        spans += [Span(end, start, Place.PADDING), Span(start, start + nbytes, Place.TENSOR)]
        end = start + nbytes
    if end != first:
        raise ValueError(f"a shard whose buffers have {first} bytes is described as one of {end}")
    spans.append(Span(first, len(content), Place.HEADER))
    return tuple(span for span in spans if span.start < span.end)


def local_copies(root: Path) -> dict[CopyKey, Path]:
    """The files of local checkpoints below the directories of all nodes."""
    found = {}
    for path in root.glob("node*/*/*.part"):
        match = _COPY.fullmatch(path.name)
        if match:
            key = CopyKey(SaveKey(int(match[1]), match[3]), int(match[2]), int(path.parent.name))
            found[key] = path
    return found
