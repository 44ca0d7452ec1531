"""Ranks as threads, which most other tests build on."""

from __future__ import annotations

import threading

import pytest

from dist_ckpt_strategies.comm.threads import ThreadCommunicator, run_ranks
from dist_ckpt_strategies.errors import PeerTimeoutError, StorageError


def test_results_come_back_by_rank() -> None:
    assert run_ranks(5, lambda comm: comm.rank) == [0, 1, 2, 3, 4]


def test_all_ranks_run_at_once() -> None:
    barrier = threading.Barrier(6, timeout=60.0)

    run_ranks(6, lambda _: barrier.wait())


def test_an_error_of_a_rank_is_raised() -> None:
    def body(comm: ThreadCommunicator) -> None:
        if comm.rank == 0:
            raise StorageError("broken")

    with pytest.raises(StorageError, match="broken"):
        run_ranks(2, body)


def test_a_rank_that_does_not_come_leaves_nobody_waiting() -> None:
    def body(comm: ThreadCommunicator) -> str:
        if comm.rank == 1:
            return "away"
        with pytest.raises(PeerTimeoutError, match="did not arrive"):
            comm.all_gather(None)
        return "timeout"

    assert run_ranks(3, body, timeout_s=0.3) == ["timeout", "away", "timeout"]
