"""What the bytes of a local checkpoint's file are, by the table in docs/local.md.

Takes nothing from the package: what the package calls padding is not believed.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.chaos.oracle import CopyKey, Place, SaveKey

_BLOCK = 4096
_LARGE = 64 << 10
_ALIGNMENT = 64
_PREFIX = 32
_COPY = re.compile(r"iter_(\d+)_(\d+)_local_([0-9a-f]+)\.part")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that are one thing."""

    start: int
    end: int
    place: Place


def file_map(content: bytes) -> tuple[Span, ...]:
    """What each byte of a shard's file is."""
    end = _PREFIX + int.from_bytes(content[8:16], "little")
    described = json.loads(content[_PREFIX:end])
    spans = [Span(0, end, Place.HEADER)]
    position = _up(end, _BLOCK)
    for _, dtype, shape, *_ in described["buffers"]:
        nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
        start = _up(position, _BLOCK if nbytes >= _LARGE else _ALIGNMENT)
        spans += [Span(end, start, Place.PADDING), Span(start, start + nbytes, Place.TENSOR)]
        position = end = start + nbytes
    if end != len(content):
        raise ValueError(f"a shard of {len(content)} bytes is described as one of {end}")
    return tuple(span for span in spans if span.start < span.end)


def _up(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment


def local_copies(root: Path) -> dict[CopyKey, Path]:
    """The files of local checkpoints below the directories of all nodes."""
    found = {}
    for path in root.glob("node*/*/*.part"):
        match = _COPY.fullmatch(path.name)
        if match:
            key = CopyKey(SaveKey(int(match[1]), match[3]), int(match[2]), int(path.parent.name))
            found[key] = path
    return found
