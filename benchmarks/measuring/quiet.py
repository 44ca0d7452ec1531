"""Imports of Megatron-Core that say nothing of what it would use on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Without Megatron-Core's warnings, of which there is one for each module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
