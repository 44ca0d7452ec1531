"""Memory that ranks of one host share: what is lost, late, refused, and given back."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.comm import host_links
from dist_ckpt_strategies.comm.base import Communicator, Receive, Send
from dist_ckpt_strategies.comm.host_links import link_hosts
from dist_ckpt_strategies.comm.new_groups import new_gloo_groups
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.errors import PeerError, PeerLostError, PeerTimeoutError
from tests.comm.communicators import SLOT_NBYTES, linked
from tests.support.ranks import RankDiedError, run_processes

pytestmark = pytest.mark.multiprocess


def linked_world(rank: int, timeout_s: float = 20.0, num_hosts: int = 1) -> Communicator:
    links = linked(rank, num_hosts)
    return open_communicator(None, timeout_s=timeout_s, purpose="a load from /ckpt", links=links)


# Bytes


def random_exchanges(rank: int, seed: int, num_hosts: int) -> int:
    """The same for all, some to many, ranks at their own pace; how many parts were wrong."""
    comm = linked_world(rank, num_hosts=num_hosts)
    rng, own = np.random.default_rng(seed), np.random.default_rng([seed, rank])
    num_wrong = 0
    for _ in range(20):
        messages: list[tuple[int, list[int], Any]] = []
        for _ in range(rng.integers(0, 8)):
            by = int(rng.integers(comm.size))
            to = [r for r in range(comm.size) if r != by and rng.random() < 0.6]
            nbytes = int(rng.choice([0, 1, SLOT_NBYTES - 1, SLOT_NBYTES, 5 * SLOT_NBYTES + 7]))
            messages.append((by, to, rng.integers(0, 256, nbytes, np.uint8)))
        sent = [(data.copy(), to) for by, to, data in messages if by == rank]
        sends = [Send(r, data) for data, to in sent for r in to]
        due = [(by, data) for by, to, data in messages if rank in to]
        receives = [Receive(by, torch.full((data.size,), 77).to(torch.uint8)) for by, data in due]
        exchange = comm.begin_exchange(sends, receives)
        time.sleep(own.random() * 0.005)
        exchange.wait()
        for data, _ in sent:
            data[...] = 99
        pairs = zip(receives, due, strict=True)
        num_wrong += sum(not np.array_equal(got.into, data) for got, (_, data) in pairs)
    return num_wrong


@pytest.mark.parametrize(("seed", "num_hosts"), [(1, 1), (2, 1), (3, 2)])
def test_whatever_is_sent_to_whomever_arrives(seed: int, num_hosts: int) -> None:
    assert run_processes(4, random_exchanges, seed, num_hosts) == [0, 0, 0, 0]


# Peers that are gone


def one_dies(rank: int, when: str) -> Any:
    comm = linked_world(rank)
    data = np.zeros(8 * SLOT_NBYTES, np.uint8)
    others = [r for r in range(4) if r != rank]
    comm.all_gather(None)
    if rank == 2 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        exchange = comm.begin_exchange(
            [Send(r, data) for r in others], [Receive(r, np.empty_like(data)) for r in others]
        )
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.wait()
    except PeerLostError as error:
        return error, time.monotonic() - began
    return None


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_rank_that_dies_is_named_at_once(when: str) -> None:
    results = run_processes(4, one_dies, when)

    assert isinstance(results.pop(2), RankDiedError)
    errors = [error for error, _ in results]
    assert 2 in {error.rank for error in errors}
    assert all("a load from /ckpt" in str(error) for error in errors)
    assert max(seconds for _, seconds in results) < 10


def one_stops(rank: int) -> Any:
    comm = linked_world(rank, timeout_s=3.0)
    if rank == 1:
        comm.all_gather(None)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        comm.all_gather(None)
        comm.exchange([], [Receive(1, np.empty(3, np.uint8))])
    except PeerTimeoutError as error:
        return error
    return None


def test_a_rank_that_hangs_is_named_after_the_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] not done .*rank 1 did not arrive"):
        run_processes(3, one_stops, timeout_s=12.0)


def one_is_late(rank: int) -> list[str]:
    """Exchanges, each with other bytes, of which the late rank comes too late to the first."""
    world = open_communicator(None, timeout_s=20.0, purpose="a meeting of neighbours")
    links = link_hosts(world, 12 * SLOT_NBYTES, slot_nbytes=SLOT_NBYTES)
    assert links is not None
    channels = new_gloo_groups(None, 2, timeout_s=20.0)
    comm = open_communicator(
        channels[0], timeout_s=1.0, purpose="a load", channels=channels, links=links
    )
    comm.all_gather(None)
    outcomes = []
    for number in range(3):
        data = np.full(3 * SLOT_NBYTES, number, np.uint8)
        into = np.full_like(data, 99)
        time.sleep(1.6 if rank == 1 and number == 0 else 0)
        try:
            exchange = comm.begin_exchange([Send(1 - rank, data)], [Receive(1 - rank, into)])
            exchange.wait()
            outcomes.append("right" if np.array_equal(into, data) else "wrong")
        except PeerError:
            outcomes.append("error")
    try:
        comm.all_gather(None)
        outcomes.append("met")
    except PeerError:
        outcomes.append("error")
    return [*outcomes, str(links.nbytes)]


def test_what_a_late_rank_left_behind_is_never_taken_for_what_comes_next() -> None:
    punctual, late = run_processes(2, one_is_late)

    assert punctual == [*["error"] * 4, "0"]
    assert late[1:] == [*["error"] * 3, "0"]
    assert late[0] != "wrong"


def one_gives_up(rank: int) -> Any:
    """Rank 0 waits for rank 1, which leaves without what it should have sent."""
    comm = linked_world(rank)
    comm.all_gather(None)
    began = time.monotonic()
    exchange = comm.begin_exchange([], [Receive(1, np.empty(3, np.uint8))] if rank == 0 else [])
    if rank == 1:
        del exchange, comm
        gc.collect()
        return None
    try:
        exchange.wait()
    except PeerLostError as error:
        return error.rank, str(error), time.monotonic() - began
    return None


def test_a_rank_that_gave_up_is_not_waited_for_until_the_timeout() -> None:
    (rank, text, seconds), _ = run_processes(2, one_gives_up)

    assert rank == 1
    assert "see what it has raised first" in text
    assert seconds < 15


# Links that are not made


def refuses(rank: int, what: str) -> Any:
    if what == "memory" and rank == 1:
        vars(host_links)["os"] = _Refusing("posix_fallocate")
    if what == "processes" and rank == 1:
        vars(host_links)["os"] = _Refusing("pidfd_open")
    if what == "another process" and rank == 1:
        vars(host_links)["os"] = _Refusing("getpid")
    world = open_communicator(None, timeout_s=20.0, purpose="a meeting of neighbours")
    links = link_hosts(world, 12 * SLOT_NBYTES, slot_nbytes=SLOT_NBYTES)
    comm = open_communicator(None, timeout_s=20.0, purpose="a test", links=links)
    into = np.zeros(3, np.uint8)
    comm.exchange(
        [Send((rank + 1) % 3, np.full(3, rank, np.uint8))], [Receive((rank - 1) % 3, into)]
    )
    return sorted(links.ranks) if links else None, into.tolist()


class _Refusing:
    """The module ``os`` of a process that may not do one thing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(os, name)
        if name == "getpid":
            return os.getppid

        def refuse(*_: object) -> None:
            raise PermissionError(1, "not permitted")

        return refuse


@pytest.mark.parametrize("what", ["memory", "processes", "another process"])
def test_a_rank_that_cannot_be_reached_is_sent_its_bytes_by_gloo(what: str) -> None:
    results = run_processes(3, refuses, what)

    assert results == [([2], [2, 2, 2]), (None, [0, 0, 0]), ([0], [1, 1, 1])]


def without_room(rank: int) -> Any:
    world = open_communicator(None, timeout_s=20.0, purpose="a meeting of neighbours")
    return link_hosts(world, 2 * SLOT_NBYTES - 1 + rank, slot_nbytes=SLOT_NBYTES)


def test_where_only_one_rank_has_room_for_a_ring_there_are_no_links() -> None:
    assert run_processes(2, without_room) == [None, None]


# What is left


def makes_and_drops(rank: int) -> list[int]:
    """Open files with links, and without them."""
    world = open_communicator(None, timeout_s=20.0, purpose="a meeting of neighbours")
    counts = []
    for _ in range(3):
        world.all_gather(None)
        before = len(list(Path("/proc/self/fd").iterdir()))
        links = link_hosts(world, 12 * SLOT_NBYTES, slot_nbytes=SLOT_NBYTES)
        counts.append(len(list(Path("/proc/self/fd").iterdir())) - before)
        del links
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())) - before)
    return counts


def test_links_have_few_files_for_each_neighbour_and_leave_none() -> None:
    for counts in run_processes(3, makes_and_drops):
        assert counts[1::2] == [0, 0, 0]
        assert 0 < max(counts) <= 10
