"""The contract of every communicator: one rank, threads, gloo processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dist_ckpt_strategies.comm.base import Communicator, Receive, Send
from dist_ckpt_strategies.errors import PeerError
from tests.comm.communicators import Carrier

MESSAGES: list[Any] = [
    None,
    True,
    0,
    -(1 << 70),
    2.5,
    "",
    "ü✓\ud800 \0",
    [],
    {},
    [None, [1, "a"], {"k": [2.5, None]}],
    "x" * 200_000,
]


def gathers_one_after_the_other(comm: Communicator) -> list[list[Any]]:
    return [comm.all_gather(message) for message in MESSAGES]


def test_messages_of_every_json_type_arrive(carrier: Carrier) -> None:
    results = carrier(gathers_one_after_the_other)

    assert all(found == [[m] * len(results) for m in MESSAGES] for found in results)


def only_the_last_rank_says_something(comm: Communicator) -> list[Any]:
    return comm.all_gather("here" if comm.rank == comm.size - 1 else None)


def test_silence_of_some_is_none_and_stays_in_its_place(carrier: Carrier) -> None:
    results = carrier(only_the_last_rank_says_something)

    assert all(items == [None] * (len(results) - 1) + ["here"] for items in results)


def changes_what_it_gathered(comm: Communicator) -> list[Any]:
    mine = [comm.rank]
    comm.all_gather(mine)[0].append("changed")
    return comm.all_gather(mine)


def test_what_one_rank_does_to_a_message_no_other_rank_sees(four_ranks: Carrier) -> None:
    results = four_ranks(changes_what_it_gathered)

    assert all(items == [[rank] for rank in range(4)] for items in results)


def pattern(source: int, to: int, number: int, size: int) -> Any:
    return np.random.default_rng([source, to, number]).integers(0, 256, size, np.uint8)


def every_rank_to_every_other(comm: Communicator, sizes: list[int]) -> bool:
    """Several parts each way, of sizes that differ by part."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    parts = list(enumerate(sizes))
    sends = [Send(to, pattern(comm.rank, to, n, size)) for to in others for n, size in parts]
    receives = [Receive(by, np.zeros(size, np.uint8)) for by in others for n, size in parts]
    comm.exchange(sends, receives)
    expected = [pattern(by, comm.rank, n, size) for by in others for n, size in parts]
    return all(np.array_equal(r.into, e) for r, e in zip(receives, expected, strict=True))


@pytest.mark.parametrize(
    "sizes", [[1], [7, 0, 100_000, 3], [8 << 20]], ids=["a byte", "several", "8 MiB"]
)
def test_bytes_go_both_ways_between_all_ranks(sizes: list[int], carrier: Carrier) -> None:
    results = carrier(every_rank_to_every_other, sizes)

    assert results == [True] * len(results)


def exchanges_nothing(comm: Communicator) -> list[Any]:
    comm.exchange([], [])
    return comm.all_gather(comm.rank)


def test_an_empty_exchange_is_an_exchange_like_any_other(carrier: Carrier) -> None:
    results = carrier(exchanges_nothing)

    assert all(items == list(range(len(results))) for items in results)


def two_ranks_exchange_and_the_others_have_nothing_to_say(comm: Communicator) -> list[int]:
    into = np.zeros(3, np.uint8)
    sends = [Send(2, np.array([1, 2, 3], np.uint8))] if comm.rank == 1 else []
    receives = [Receive(1, into)] if comm.rank == 2 else []
    comm.exchange(sends, receives)
    comm.all_gather(None)
    return [int(v) for v in into]


def test_ranks_without_a_part_in_an_exchange_take_part_all_the_same(four_ranks: Carrier) -> None:
    results = four_ranks(two_ranks_exchange_and_the_others_have_nothing_to_say)

    assert results == [[0] * 3, [0] * 3, [1, 2, 3], [0] * 3]


def the_sender_changes_its_memory_afterwards(comm: Communicator) -> list[int]:
    data, into = np.full(1 << 16, 7, np.uint8), np.zeros(1 << 16, np.uint8)
    peer = comm.rank ^ 1
    comm.exchange([Send(peer, data)], [Receive(peer, into)])
    data[...] = 9
    comm.all_gather(None)
    return [int(into.min()), int(into.max())]


def test_memory_is_the_callers_again_once_an_exchange_is_over(four_ranks: Carrier) -> None:
    assert four_ranks(the_sender_changes_its_memory_afterwards) == [[7, 7]] * 4


def many_meetings(comm: Communicator) -> bool:
    counts = [comm.all_gather([comm.rank, step]) for step in range(100)]
    return counts == [[[r, step] for r in range(comm.size)] for step in range(100)]


def test_meetings_do_not_mix(carrier: Carrier) -> None:
    results = carrier(many_meetings)

    assert results == [True] * len(results)


def one_rank_never_comes(comm: Communicator, absent: int) -> list[Any]:
    if comm.rank == absent:
        return []
    return comm.all_gather(comm.rank)


@pytest.mark.parametrize("absent", [0, 3])
def test_every_wait_ends_at_the_timeout(absent: int, four_ranks: Carrier) -> None:
    results = four_ranks(one_rank_never_comes, absent, timeout_s=2.0)

    for rank, result in enumerate(results):
        if rank != absent:
            assert isinstance(result, PeerError)
            assert isinstance(result, TimeoutError)


def the_sender_never_comes(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.exchange([], [Receive(1, np.zeros(4, np.uint8))])


def test_a_receiver_waits_for_its_sender_no_longer_than_the_timeout(four_ranks: Carrier) -> None:
    error = four_ranks(the_sender_never_comes, timeout_s=2.0)[0]

    assert isinstance(error, PeerError)
    assert isinstance(error, TimeoutError)
    assert error.rank == 1
