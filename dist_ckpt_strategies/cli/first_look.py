"""The first look at an object store: one that is out of reach says so soon, in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dist_ckpt_strategies.config import debug_from_environment, store_options_from_environment
from dist_ckpt_strategies.storage.urls import StoreUrl, parsed_address

_FIRST_LOOK_S = 13.0
"""With the try that says why there was no answer, 15 s in all."""


def require_answers(*addresses: str) -> None:
    """Ask each object store that is named for a short list: one that is out of reach says so soon.

    ``DIST_CKPT_STORE_TIMEOUT_S`` sets another limit. TensorStore's libraries write to stderr which
    files with credentials they miss; the error says what matters of it.

    Raises:
        StoreUnreachableError, StoreAccessError, BucketNotFoundError: the store does not give it.
        StrategyError: an address is none, or the environment makes no sense.
    """
    for address in addresses:
        url = parsed_address(address)
        if isinstance(url, StoreUrl):
            from dist_ckpt_strategies.storage.bucket import Bucket  # noqa: PLC0415

            with _no_library_logs():
                options = store_options_from_environment(timeout_s=_FIRST_LOOK_S)
                Bucket(url, options).require_bucket()


@contextmanager
def _no_library_logs() -> Iterator[None]:
    """Nothing that is written to file descriptor 2 is seen meanwhile."""
    if sys.stderr is None or debug_from_environment():  # closed from the start
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - as os.dup2
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
