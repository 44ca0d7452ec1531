"""Work behind training, and how others see that it has ended."""

from __future__ import annotations

import gc
import os
import threading
from functools import partial

import pytest

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import run_collectively
from dist_ckpt_strategies.errors import (
    PlanError,
    SaveTimeoutError,
)
from dist_ckpt_strategies.sharded.async_request import (
    BackgroundWork,
    LocalSaveRequest,
    start_on_all,
)
from tests.support.thread_ranks import ThreadCommunicator, run_ranks

NAME = ("5afe", "the end of a save")


def test_ranks_wait_for_a_save_for_longer_than_they_wait_for_each_other() -> None:
    may_end = threading.Event()

    def body(comm: ThreadCommunicator) -> str:
        work = start_on_all(comm, lambda: BackgroundWork(lambda: _ends(comm, may_end), "work"))
        request = LocalSaveRequest.of(comm, NAME, work, lambda: None, timeout_s=1.0)
        if comm.rank == 0:
            threading.Timer(3.0, may_end.set).start()
        request.wait(60.0)
        return str(work.result())

    assert run_ranks(3, body, timeout_s=1.0) == ["0", "1", "2"]


def test_ranks_that_end_saves_in_another_order_learn_it_and_may_end_all_of_them() -> None:
    def body(comm: ThreadCommunicator) -> list[str]:
        ended: list[str] = []
        requests = []
        for token in ("a", "b"):
            work = start_on_all(comm, lambda: BackgroundWork(lambda: comm.rank, "work"))
            name = (token, f"the end of save {token}")
            finalise = partial(ended.append, token)
            requests.append(LocalSaveRequest.of(comm, name, work, finalise, 20.0))
        mine = requests[comm.rank == 1]
        for end in (mine.wait, mine.finalize_fns[0]):
            with pytest.raises(PlanError) as caught:
                end()
        for request in requests:
            request.finalize_fns[0]()
            request.wait()
        return [str(caught.value), *ended]

    text = (
        "expected all ranks to end their saves in the same order, found ranks [0, 2] in the end of "
        "save a; ranks [1] in the end of save b"
    )
    assert run_ranks(3, body) == [[text, "a", "b"]] * 3


def test_a_save_that_takes_too_long_on_one_rank_may_be_waited_for_again_by_all() -> None:
    may_end = threading.Event()

    def body(comm: ThreadCommunicator) -> list[str]:
        work = start_on_all(comm, lambda: BackgroundWork(lambda: _ends(comm, may_end), "work"))
        request = LocalSaveRequest.of(
            comm, NAME, work, lambda: run_collectively(comm, lambda: None), 20.0
        )
        with pytest.raises(SaveTimeoutError) as caught:
            request.wait(0.05)
        run_collectively(comm, may_end.set)
        request.wait()
        request.wait()
        return [str(caught.value), str(work.result())]

    text = "rank 2: the save is not done after 0.05 s"
    assert run_ranks(3, body) == [[text, str(rank)] for rank in range(3)]


def _ends(comm: Communicator, may_end: threading.Event) -> int:
    assert comm.rank != 2 or may_end.wait(20)
    return comm.rank


def test_a_work_that_never_began_leaves_no_mark_and_a_forked_child_takes_none_away() -> None:
    work = BackgroundWork(lambda: None, "work")
    mark = work.mark
    child = os.fork()
    if child == 0:
        del work
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    was_there = mark.exists()
    work.call_off()
    work.wait(60)

    assert (was_there, mark.exists()) == (True, False)
