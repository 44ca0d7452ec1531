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

_ALIGNMENT = 64
_END = 32
_COPY = re.compile(r"iter_(\d+)_(\d+)_local_([0-9a-f]+)\.part")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that are one thing."""

    start: int
    end: int
    place: Place


def file_map(content: bytes) -> tuple[Span, ...]:
    """What each byte of a shard's file is."""
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
