"""Arrays whose bytes a lazy implementation would change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import DType, Shape

Values = npt.NDArray[Any]


def random_values(shape: Shape, dtype: DType) -> Values:
    """Every kind of bit pattern: NaNs with payloads, infinities, subnormals, negative zeros."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    if dtype is DType.BOOL:
        raw &= 1
    return raw.view(dtype.numpy).reshape(shape)


def same_bytes(one: Values, other: Values) -> bool:
    """Whether two arrays agree in shape, type and every bit."""
    return (
        one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    )
