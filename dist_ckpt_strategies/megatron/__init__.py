"""Adapter to Megatron-Core, its only importer: types, save and load flow, registry."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dist_ckpt_strategies.errors import MissingDependencyError


@contextmanager
def needs_megatron_core() -> Iterator[None]:
    """Make an ImportError within the block a MissingDependencyError that says what is needed."""
    try:
        yield
    except ImportError as error:
        found = getattr(sys.modules.get("megatron.core"), "__version__", "none")
        raise MissingDependencyError(
            f"expected megatron-core 0.16 or later, with what this package uses of it, found "
            f"{found}: {error}; install megatron-core>=0.16, or a newer dist-ckpt-strategies"
        ) from error


with needs_megatron_core():  # before any of this package's modules below is imported
    from dist_ckpt_strategies.megatron import shards, types  # noqa: F401
