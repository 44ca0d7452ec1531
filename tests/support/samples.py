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
