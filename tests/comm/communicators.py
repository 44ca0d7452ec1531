"""The same body on every rank of a group, whatever carries the messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_ckpt_strategies.comm import host_links
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.host_links import HostLinks, link_hosts
from dist_ckpt_strategies.comm.solo import SoloCommunicator
from dist_ckpt_strategies.comm.threads import ThreadCommunicator, run_ranks
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from tests.support.ranks import run_processes

SLOT_NBYTES = 64 << 10

_LINKED: list[HostLinks] = []
"""Links of this process, which stay open for as long as it lives."""

Body = Callable[..., Any]
Carrier = Callable[..., list[Any]]
"""Runs ``body(comm, *args)`` on a number of ranks; results, or exceptions as objects, by rank."""


def over_solo(body: Body, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """One rank."""
    return [_outcome(body, SoloCommunicator(), args)]


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


def over_links(body: Body, *args: Any, timeout_s: float = 10.0) -> list[Any]:
    """Four processes that share memory; rings of less than what some exchanges carry."""
    return run_processes(4, on_linked_rank, body, args, timeout_s, 1)


def over_links_and_gloo(body: Body, *args: Any, timeout_s: float = 10.0) -> list[Any]:
    """Four processes, as on two hosts: memory is shared on each, and gloo goes between them."""
    return run_processes(4, on_linked_rank, body, args, timeout_s, 2)


def on_linked_rank(
    rank: int, body: Body, args: tuple[Any, ...], timeout_s: float, num_hosts: int
) -> Any:
    """What they do in each of their processes."""
    links = linked(rank, num_hosts)
    _LINKED.append(links)
    comm = open_communicator(None, timeout_s=timeout_s, purpose="a test", links=links)
    return body(comm, *args)


def linked(rank: int, num_hosts: int = 1) -> HostLinks:
    """Links between ranks that take themselves to be on one of some hosts in turn."""
    vars(host_links)["_host"] = lambda: f"host {rank % num_hosts}"
    world = open_communicator(None, timeout_s=20.0, purpose="a meeting of neighbours")
    links = link_hosts(world, 12 * SLOT_NBYTES, slot_nbytes=SLOT_NBYTES)
    assert links is not None
    return links


def _outcome(body: Body, comm: Communicator, args: tuple[Any, ...]) -> Any:
    try:
        return body(comm, *args)
    except Exception as error:  # noqa: BLE001 - handed to the test, which looks at it
        return error
