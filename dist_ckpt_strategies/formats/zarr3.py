"""The layout of format ("zarr", 2): one Zarr v3 array in a directory per key, below ``arrays``.

The file of a chunk holds inner chunks (codec ``sharding_indexed``), one after the other in C order,
then the index of them. TensorStore reads such arrays, and zarr-python those of a dtype it knows.

Source: the Zarr v3 specification.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dist_ckpt_strategies.core.array import ArraySpec, DType

METADATA_NAME = "zarr.json"
_END = "}}}"
"""Of the file: what stands behind the key, the last value in it."""


def metadata_content(array: ArraySpec) -> bytes:
    """The bytes of ``zarr.json``. The arrays of all layers have few descriptions between them."""
    return (_before_key(replace(array, key="")) + json.dumps(array.key) + _END).encode()


@lru_cache(maxsize=256)
def _before_key(array: ArraySpec) -> str:
    assert array.inner_shape is not None  # noqa: S101 - callers pass arrays of format 2
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    checksum = {"name": "crc32c"}
    inner_codecs = [little_endian, checksum] if array.has_crc32c else [little_endian]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": array.dtype.value,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": array.chunk_shape},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": array.inner_shape,
                    "codecs": inner_codecs,
                    "index_codecs": [little_endian, checksum],
                    "index_location": "end",
                },
            }
        ],
        "fill_value": _fill_value(array.dtype),
        "attributes": {"dist_ckpt_strategies": {"key": array.key}},
    }
    # With indent, json takes ten times as long.
    return json.dumps(metadata).removesuffix(f'""{_END}')


def _fill_value(dtype: DType) -> Any:
    """Zero, as Zarr v3 spells it for a dtype; no chunk of ours is ever left out."""
    if dtype is DType.BOOL:
        return False
    if dtype.value.startswith("complex"):
        return [0.0, 0.0]
    return 0 if "int" in dtype.value else 0.0
