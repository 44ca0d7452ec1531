"""The registries of strategies, as before any registration, and put back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron.core.dist_checkpointing.strategies import base

from dist_ckpt_strategies.strategies.registry import REGISTERED


@contextmanager
def fresh_registries() -> Iterator[None]:
    """Ours is empty and Megatron-Core's holds its own strategies; both are restored at the end."""
    theirs = {
        action: {key: s for key, s in found.items() if not _is_ours(s)}
        for action, found in base.default_strategies.items()
    }
    changed = mock.patch.dict(base.default_strategies, theirs)
    with changed, mock.patch.dict(REGISTERED, clear=True):
        yield


def _is_ours(strategy: object) -> bool:
    return type(strategy).__module__.startswith("dist_ckpt_strategies")
