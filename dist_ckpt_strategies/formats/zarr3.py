"""The layout of format ("zarr", 2): one Zarr v3 array in a directory per key, below ``arrays``.

The file of a chunk holds inner chunks (codec ``sharding_indexed``), one after the other in C order,
then the index of them. TensorStore reads such arrays, and zarr-python those of a dtype it knows.

Source: the Zarr v3 specification.
"""

from __future__ import annotations

import json
import re
from typing import Any

import xxhash

from dist_ckpt_strategies.core.array import ArraySpec, DType

ARRAYS_NAME = "arrays"
METADATA_NAME = "zarr.json"

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SAFE_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_MAX_NAME_NBYTES = 200
_KEPT_OF_LONG_NBYTES = 150


def array_directory(key: str) -> str:
    """The directory of an array, below the checkpoint's: ``arrays/KEY`` for a plain key.

    Other bytes are written as ``%`` and two hexadecimal digits. A name too long for file systems is
    cut, and ends in ``%`` and a digest of the whole. No two keys have the same.
    """
    if _PLAIN.fullmatch(key) and len(key) <= _MAX_NAME_NBYTES:
        return f"{ARRAYS_NAME}/{key}"
    content = key.encode(errors="surrogatepass")
    name = "".join(
        chr(byte) if byte in _SAFE_BYTES and (place or byte != ord(".")) else f"%{byte:02X}"
        for place, byte in enumerate(content)
    )
    if len(name) > _MAX_NAME_NBYTES or not name:
        name = f"{name[:_KEPT_OF_LONG_NBYTES]}%{xxhash.xxh3_128_hexdigest(content)}"
    return f"{ARRAYS_NAME}/{name}"


def metadata_content(array: ArraySpec) -> bytes:
    """The bytes of ``zarr.json``."""
    assert array.inner_shape is not None  # noqa: S101 - callers pass arrays of format 2
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    checksum = {"name": "crc32c"}
    inner_codecs = [little_endian, checksum] if array.has_crc32c else [little_endian]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype.value,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(array.chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(array.inner_shape),
                    "codecs": inner_codecs,
                    "index_codecs": [little_endian, checksum],
                    "index_location": "end",
                },
            }
        ],
        "fill_value": _fill_value(array.dtype),
        "attributes": {"dist_ckpt_strategies": {"key": array.key}},
    }
    return json.dumps(metadata).encode()  # with indent, json takes ten times as long


def _fill_value(dtype: DType) -> Any:
    """Zero, as Zarr v3 spells it for a dtype; no chunk of ours is ever left out."""
    if dtype is DType.BOOL:
        return False
    if dtype.value.startswith("complex"):
        return [0.0, 0.0]
    return 0 if "int" in dtype.value else 0.0
