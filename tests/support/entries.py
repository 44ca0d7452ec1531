"""The two ways into a checkpoint: Megatron-Core's own save and load, and this package's."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CheckpointError, PeerError
from tests.support.ranks import done_by

ZARR = ("zarr", 1)
PACKS = ("safetensors", 1)
FORMATS = (("zarr", 1), PACKS)
"""What this package saves."""


class Entry(StrEnum):
    """Whose ``save`` and ``load`` are called."""

    MEGATRON = "megatron"
    OURS = "ours"


_default = [ZARR]


def default_format() -> tuple[str, int]:
    """What ``save`` saves in this process, if it is not told."""
    return _default[0]


def save(entry: Entry, state: dict[str, Any], root: Path, **options: Any) -> None:
    """Save with ("zarr", 1), or what ``require_on_ranks`` was given. Collective: world.

    Megatron-Core wants the directory to be there, and changes the state dict; both are seen to.
    """
    options = {"sharded_strategy": default_format()} | options
    if entry is Entry.OURS:
        dist_ckpt_strategies.save(state, root, **options)
        return
    if dist.get_rank() == 0:
        root.mkdir(exist_ok=True, parents=True)
    dist.barrier()
    dist_checkpointing.save(dict(state), str(root), **options)


def load(entry: Entry, state: dict[str, Any], root: Path, **options: Any) -> Any:
    """Load what the checkpoint's marker says. Collective: world."""
    if entry is Entry.OURS:
        return dist_ckpt_strategies.load(state, root, **options)
    return dist_checkpointing.load(state, str(root), **options)


def prepare(
    timeout_s: float, *, default: tuple[str, int] | None = None, **registration: Any
) -> None:
    """Set the timeout of this process, for everything, and register the strategies.

    ``default`` is what ``save`` saves if it is not told.
    """
    _default[:] = [default or default_format()]
    os.environ["DIST_CKPT_TIMEOUT_S"] = str(timeout_s)
    dist_ckpt_strategies.register(**{"replace": True} | registration)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank's caller could see of an error."""

    kinds: tuple[str, ...]  # names of the error's class and of all above it
    is_ours: bool  # whether ``except CheckpointError`` takes it
    is_megatrons: bool  # whether ``except CheckpointingException`` takes it
    text: str  # the message
    global_rank: int | None  # the rank at fault, as the error says
    key: str | None  # the key at fault
    path: str | None  # the file at fault
    seconds: float  # from the call to the error


def outcome(action: Callable[[], Any]) -> Any:
    """What the action returns, or the Failure; torch's CheckpointException is no Exception."""
    started = time.monotonic()
    try:
        return action()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - the test looks at it
        return Failure(
            tuple(kind.__name__ for kind in type(error).__mro__),
            isinstance(error, CheckpointError),
            isinstance(error, CheckpointingException),
            str(error),
            getattr(error, "global_rank", None),
            getattr(error, "key", None),
            getattr(error, "path", None),
            time.monotonic() - started,
        )


def logged(name: str = "", level: int = logging.NOTSET) -> list[str]:
    """The messages of a logger of this package, from now on until the process ends."""
    texts: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(f"dist_ckpt_strategies{name}").addHandler(handler)
    return texts


def require_failure_everywhere(
    results: Sequence[Any], *, kind: type[Exception], culprit: int, names: Sequence[str]
) -> None:
    """Every rank raised an error of that class, in both families, that names all it should."""
    for rank, result in enumerate(results):
        found = require_failure(result, kind, *names, global_rank=culprit)
        assert found.text.startswith(f"rank {culprit}: "), (rank, found)
        assert (PeerError.__name__ in found.kinds) == (rank != culprit), (rank, found)


def require_refused(
    action: Callable[[], Any], kind: type[Exception], *words: str, **fields: Any
) -> Failure:
    """The action raises an error of that class, in both families, with those words and fields."""
    return require_failure(outcome(action), kind, *words, **fields)


def require_failure(found: Any, kind: type[Exception], *words: str, **fields: Any) -> Failure:
    """It is an error of that class, in both families, with those words and fields."""
    assert isinstance(found, Failure), f"expected a {kind.__name__}: {words}; found {found}"
    assert kind.__name__ in found.kinds, found
    assert found.is_ours, found
    assert found.is_megatrons, found
    assert all(word in found.text for word in words), (words, found)
    assert all(getattr(found, name) == value for name, value in fields.items()), (fields, found)
    return found


def require_on_ranks(
    size: int, act: Callable[..., None], *args: Any, default: tuple[str, int] = ZARR
) -> None:
    """``act(rank, *args)`` raises nothing on any rank, with the strategies registered.

    ``default`` is what ``save`` saves if it is not told.
    """
    found = done_by(size, _run_registered, act, args, default, timeout_s=300)
    assert found == [None] * size


def _run_registered(
    rank: int, act: Callable[..., None], args: tuple[Any, ...], default: tuple[str, int]
) -> None:
    prepare(60, default=default)
    act(rank, *args)
