"""Packs that ranks have saved as threads, and places of packs that tests can damage."""

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import xxhash

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.formats import pack, pack_header, pack_read, pack_write
from dist_ckpt_strategies.formats.locations import PACKS as MARKER
from dist_ckpt_strategies.formats.pack import PackLimits
from dist_ckpt_strategies.sharded import save
from dist_ckpt_strategies.sharded.save import (
    PACKS,
    Contents,
    Started,
    finish_save,
    start_save,
    write_share,
)
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.store import Bytes
from tests.support.thread_ranks import ThreadCommunicator, run_ranks


def save_packs(
    root: Path,
    size: int,
    contents: Callable[[int], Contents],
    *,
    limits: PackLimits | None = None,
    before_commit: Callable[[Started], None] = lambda _: None,
) -> None:
    """Save what ``contents`` gives for each rank, as packs of these limits."""
    options = Options(timeout_s=60.0)

    def body(comm: ThreadCommunicator) -> None:
        prepare = lambda: (Directory(root), contents(comm.rank), None)  # noqa: E731
        started = start_save(comm, PACKS, prepare, None, options)
        records = write_share(started)
        before_commit(started)
        finish_save(started, lambda: records, marker=MARKER.to_json())

    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if limits is not None:
            stack.enter_context(patch.object(save, "limits_of", lambda *_: limits))
        run_ranks(size, body)


@contextmanager
def small_ranges(nbytes: int) -> Iterator[None]:
    """Within the block digests are of ranges of so many bytes, and calls read and write eight."""
    with ExitStack() as stack:
        for module in (pack, pack_header, pack_read, pack_write):
            stack.enter_context(patch.object(module, "RANGE_NBYTES", nbytes))
        stack.enter_context(patch.object(pack_header, "_READ_NBYTES", 8 * nbytes))
        stack.enter_context(patch.object(pack_write, "_WRITE_NBYTES", 8 * nbytes))
        yield


@dataclass
class IndexParts:
    """What the full index of a small checkpoint says, as it stands in the file."""

    root: dict[str, Any]
    kinds: list[list[Any]]  # of arrays: dtype and shape
    of_key: list[int]
    keys: list[Any]
    rows: Any  # int64: array, origin, extent, pack, byte offset, first range
    objects: list[list[Any]]
    packs: Any  # bytes of the records


def with_index(root: Path, change: Callable[[IndexParts], object]) -> Path:
    """Give a checkpoint another index, whose digests are right: an error of its writer.

    Of one segment of each kind, as docs/packs.md has them.
    """
    pointer = json.loads((root / "index").read_bytes())
    path = root / "saves" / pointer["save_id"] / "index"
    content, end = path.read_bytes(), pointer["byte_offset"]
    described = json.loads(content[end : end + pointer["nbytes"]])
    blocks, objects, packs = (
        zlib.decompress(content[start : start + nbytes])
        for kind in ("arrays", "objects", "packs")
        for *_, start, nbytes, _digest in described[kind]
    )
    length, num_rows, width = struct.unpack_from("<QQQ", blocks)
    kinds, of_key, keys = json.loads(blocks[24 : 24 + length])
    rows = np.frombuffer(blocks, "<i8", offset=24 + length).reshape(num_rows, -1).copy()
    records = bytearray(packs)
    parts = IndexParts(described, kinds, of_key, keys, rows, json.loads(objects), records)
    change(parts)

    head_text = json.dumps([parts.kinds, parts.of_key, parts.keys]).encode()
    table = struct.pack("<QQQ", len(head_text), len(parts.rows), width)
    new = b""
    for kind, segment in (
        ("arrays", table + head_text + parts.rows.astype("<i8").tobytes()),
        ("objects", json.dumps(parts.objects).encode()),
        ("packs", bytes(parts.packs)),
    ):
        packed = zlib.compress(segment)
        if isinstance(parts.root.get(kind), list) and parts.root[kind]:
            digest = xxhash.xxh3_128_hexdigest(packed)
            parts.root[kind][0][-3:] = [len(new), len(packed), digest]
        new += packed
    text = json.dumps(parts.root).encode()
    pointer |= {"byte_offset": len(new), "nbytes": len(text)}
    pointer["digest"] = xxhash.xxh3_128_hexdigest(text)
    path.write_bytes(new + text + struct.pack("<Q", len(text)))
    (root / "index").write_bytes(json.dumps(pointer).encode())
    return root


class MemoryPlace:
    """Files in memory, to be damaged thousands of times; those of Place's methods that read."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def path(self, name: str) -> str:
        return name

    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        if name not in self.files:
            raise IncompleteCheckpointError(f"{name} does not exist", path=name)
        end = None if nbytes < 0 else byte_offset + nbytes
        return self.files[name][byte_offset:end]

    def read_into(self, name: str, byte_offset: int, targets: Sequence[Bytes]) -> None:
        for target in targets:
            content = self.read(name, byte_offset, target.size)
            if len(content) < target.size:
                raise CorruptCheckpointError(f"{name} is damaged: it ends", path=name)
            target.data[:] = memoryview(content)
            byte_offset += target.size

    def read_steps(self, name: str, byte_offset: int, targets: Sequence[Bytes]) -> Iterator[int]:
        self.read_into(name, byte_offset, targets)
        yield len(targets)

    def write_pieces(self, name: str, pieces: Any) -> None:
        self.files[name] = b"".join(piece.tobytes() for some in pieces for piece in some)
