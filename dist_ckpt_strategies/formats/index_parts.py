"""Checks of the parts of a full index: digests match, but the writer may have erred. Pure.

Each function raises one of ``MALFORMED`` where a part is something else.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from dist_ckpt_strategies.core.array import DType, ObjectId
from dist_ckpt_strategies.core.blocks import BlockTable
from dist_ckpt_strategies.formats.pack import StoredBytes, StoredObject
from dist_ckpt_strategies.formats.pack_header import checked_size

RECORDS = 1024
"""Packs in a segment."""

_MAX_NBYTES = 1 << 30


def require(is_good: bool, name: str, value: object) -> None:  # noqa: FBT001
    """Raise a ValueError unless something is as it should be."""
    if not is_good:
        raise ValueError(f"{name} {value!r}")


def inflated(segment: bytes) -> bytes:
    """The bytes of a compressed segment."""
    stream = zlib.decompressobj()
    content = stream.decompress(segment, _MAX_NBYTES)
    require(stream.eof, "size", f"over {len(content)}")
    return content


def checked_root(content: bytes, end: int) -> dict[str, Any]:
    """The root, which lists segments that end before it."""
    root: dict[str, Any] = json.loads(content)
    arrays, objects, packs = root["arrays"], root["objects"], root["packs"]
    for *_, byte_offset, nbytes, digest in (*arrays, *objects, *packs):
        is_before = checked_size(byte_offset) + checked_size(nbytes) <= end
        require(is_before and isinstance(digest, str), "segment", (byte_offset, nbytes, digest))
    for segments in (arrays, objects):
        firsts = [segment[0] for segment in segments]
        require(all(isinstance(first, str) for first in firsts), "first keys", firsts)
    num_packs = checked_size(root["num_packs"])
    require(len(packs) == -(-num_packs // RECORDS), "num_packs", num_packs)
    if root["common"] is not None:
        _stored(root["common"], num_packs)
    features = root.get("features", [])
    require(all(isinstance(name, str) for name in features), "features", features)
    base = root.get("base", {"path": "", "digest": ""})
    require(all(isinstance(base[name], str) for name in ("path", "digest")), "base", base)
    return root


def checked_table(content: bytes, num_packs: int) -> BlockTable:
    """The blocks of a segment; whether they make up their arrays is not compared."""
    table = BlockTable.from_bytes(content)
    for facts in set(table.facts):
        DType(facts.dtype)
        sum(map(checked_size, facts.shape))
    require([*table.keys] == sorted(set(table.keys)) != [], "keys", table.keys)
    is_known = (table.place >= 0).all() and (table.place[:, 0] < num_packs).all()
    require(bool(is_known), "places of", table.keys)
    return table


def checked_objects(content: bytes, num_packs: int) -> list[StoredObject]:
    """The shards of objects of a segment."""
    objects: list[StoredObject] = []
    for key, *place, pack, byte_offset, first_range, nbytes in json.loads(content):
        offset, shape = (tuple(map(checked_size, part)) for part in place)
        require(isinstance(key, str) and len(offset) == len(shape), "object", key)
        where = pack, byte_offset, first_range, nbytes
        objects.append((ObjectId(key, offset, shape), _stored(where, num_packs)))
    ids = [name for name, _ in objects]
    require(ids == sorted(set(ids)), "objects", ids)
    return objects


def _stored(where: Sequence[Any], num_packs: int) -> StoredBytes:
    stored = StoredBytes(*map(checked_size, where))
    require(stored.pack < num_packs, "pack", stored.pack)
    return stored
