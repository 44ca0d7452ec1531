"""The classes that a Megatron-Core checkpoint may need when it is unpickled."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from megatron.core import safe_globals


def default_allowed() -> list[Any]:
    """Megatron-Core's own list, and numpy's arrays under the names of numpy 1 and 2.

    Arrays are rebuilt by ``_reconstruct`` and ``scalar``, which moved from ``numpy.core`` to
    ``numpy._core`` with numpy 2: a checkpoint names the module of its writer.
    """
    megatron_classes: list[Any] = list(safe_globals.SAFE_GLOBALS)
    return [*megatron_classes, types.SimpleNamespace, *_numpy_allowed()]


def _numpy_allowed() -> list[Any]:
    multiarray = np._core.multiarray  # type: ignore[attr-defined]  # noqa: SLF001 - what pickles name
    rebuilders = [multiarray._reconstruct, multiarray.scalar]  # noqa: SLF001
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    named = [
        (rebuild, f"{module}.{rebuild.__name__}") for rebuild in rebuilders for module in modules
    ]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
    return [np.ndarray, np.dtype, *dtypes, *named]
