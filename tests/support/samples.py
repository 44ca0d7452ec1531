"""Arrays whose bytes a lazy implementation would change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, Shape

Values = npt.NDArray[Any]


def random_values(shape: Shape, dtype: DType, seed: int = 0) -> Values:
    """Every kind of bit pattern: NaNs with payloads, infinities, subnormals, negative zeros."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    if dtype is DType.BOOL:
        raw &= 1
    return raw.view(dtype.numpy).reshape(shape)


def nan_payloads(dtype: DType) -> Values:
    """Quiet and signalling NaNs of both signs, each with its own payload."""
    patterns = {2: np.uint16, 4: np.uint32, 8: np.uint64}
    size = dtype.itemsize // (2 if dtype.value.startswith("complex") else 1)
    width = {DType.BFLOAT16: 7, DType.FLOAT16: 10}.get(dtype, {4: 23, 8: 52}.get(size, 0))
    exponent = (1 << (8 * size - 1)) - (1 << width)
    payloads = [1, 3, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) | 5]
    found = [sign | exponent | p for p in payloads for sign in (0, 1 << (8 * size - 1))]
    doubled = found * 2 if dtype.value.startswith("complex") else found
    return np.array(doubled, patterns[size]).view(dtype.numpy)


def same_bytes(one: Values, other: Values) -> bool:
    """Whether two arrays agree in shape, type and every bit."""
    return (
        one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    )


def array_of(values: Values, chunk_shape: Shape | None = None, key: str = "w") -> ArraySpec:
    """The stored array that the values fill, by default in one chunk."""
    whole = tuple(max(1, n) for n in values.shape)
    dtype = DType.from_numpy(values.dtype, key=key)
    return ArraySpec(key, values.shape, dtype, whole if chunk_shape is None else chunk_shape)


def whole_of(array: ArraySpec) -> Region:
    """The box of the whole array."""
    return Region.whole(array.shape)
