"""The same body on every rank of a group, whatever carries the messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from tests.support.ranks import run_processes
from tests.support.thread_ranks import ThreadCommunicator, run_ranks

Body = Callable[..., Any]
Carrier = Callable[..., list[Any]]
"""Runs ``body(comm, *args)`` on a number of ranks; results, or exceptions as objects, by rank."""


def over_solo(body: Body, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """One rank."""
    return [_outcome(body, Communicator(), args)]


def over_threads(body: Body, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Four threads."""

    def on_rank(comm: ThreadCommunicator) -> Any:
        return _outcome(body, comm, args)

    return run_ranks(4, on_rank, timeout_s)


def over_gloo(body: Body, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Four processes of a gloo group."""
    return run_processes(4, on_gloo_rank, body, args, timeout_s)


def on_gloo_rank(rank: int, body: Body, args: tuple[Any, ...], timeout_s: float) -> Any:
    """What ``over_gloo`` does in each of its processes."""
    comm = open_communicator(None, timeout_s=timeout_s, purpose="a test")
    return body(comm, *args)


def _outcome(body: Body, comm: Communicator, args: tuple[Any, ...]) -> Any:
    try:
        return body(comm, *args)
    except Exception as error:  # noqa: BLE001 - handed to the test, which looks at it
        return error
