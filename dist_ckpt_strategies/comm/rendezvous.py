"""Keeps the attempts of a job apart where torch's process groups find each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch._C._distributed_c10d import PrefixStore

_SCHEMES = ("env", "tcp")


def store_of_attempt(base: Any, attempt: str) -> Any:
    """A store over another one, with keys of this attempt only."""
    return PrefixStore(f"attempt{attempt}", base)


@contextmanager
def rendezvous_by_attempt(
    attempt: Callable[[], int], note_store: Callable[[Any], None]
) -> Iterator[None]:
    """While this is open, ``init_process_group`` meets only ranks in the same attempt.

    That is, without a store of the caller's: with ``env://`` or ``tcp://``. The launcher's store
    outlives the attempts, and with it the addresses of dead connections: torch gives them the same
    names each time (torch 2.13; older ones looked at TORCHELASTIC_RESTART_COUNT). It has no public
    way to replace a handler; the one that was there comes back.

    Args:
        attempt: its number, the same on all ranks.
        note_store: is given each store that ranks find each other in.
    """
    module = import_module("torch.distributed.rendezvous")  # a function has its name in torch
    handlers = module._rendezvous_handlers  # noqa: SLF001 - see above
    before = {scheme: handlers[scheme] for scheme in _SCHEMES}
    handlers.update({name: _apart(found, attempt, note_store) for name, found in before.items()})
    try:
        yield
    finally:
        handlers.update(before)


def _apart(
    handler: Callable[..., Any], attempt: Callable[[], int], note_store: Callable[[Any], None]
) -> Callable[..., Any]:
    def by_attempt(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, size in handler(*args, **kwargs):
            note_store(store)
            yield PrefixStore(f"dist_ckpt/attempt/{attempt()}", store), rank, size

    return by_attempt
