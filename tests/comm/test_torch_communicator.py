"""Over real process groups: subgroups, silent peers, killed peers, and who is named."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d

from dist_ckpt_strategies.comm.base import Communicator, run_collectively
from dist_ckpt_strategies.comm.process_group import new_gloo_groups, new_group_of
from dist_ckpt_strategies.comm.shared_work import open_world
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.errors import PeerTimeoutError, StorageError
from tests.support.entries import Failure, outcome
from tests.support.processes import until
from tests.support.ranks import RankDiedError, run_processes

pytestmark = pytest.mark.multiprocess


def test_without_torch_distributed_a_process_is_alone() -> None:
    comm = open_communicator(None, timeout_s=1.0, purpose="a test")

    assert type(comm) is Communicator
    assert (comm.rank, comm.size, comm.global_ranks[0]) == (0, 1, 0)


def meet_another_collective(rank: int) -> Any:
    comm = open_communicator(None, timeout_s=60.0, purpose="a load from /ckpt")
    if rank == 0:
        dist.all_gather_object([None, None], {"what": "Megatron's own validation"})
    return outcome(lambda: run_collectively(comm, lambda: None))


def test_a_rank_that_is_in_another_collective_is_named() -> None:
    _, error = run_processes(2, meet_another_collective)

    assert "PeerLostError" in error.kinds, error
    assert error.global_rank == 0
    assert "out of step" in error.text
    assert "a load from /ckpt, collective 1" in error.text


# What leaves the ranks in step


def name_global_ranks(rank: int) -> None:
    for members in ([1, 3], [3, 2, 0], [2]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        comm = open_communicator(group, timeout_s=60.0, purpose=f"group {members}")
        names = list(comm.global_ranks)
        assert (names[comm.rank], sorted(names)) == (rank, sorted(members))

        def step() -> None:
            if rank == 3:
                raise StorageError("broken")

        found = outcome(lambda comm=comm, step=step: run_collectively(comm, step))  # type: ignore[misc]
        assert (found is None) == (3 not in members)
        assert found is None or found.text == "rank 3: broken"


def make_groups(rank: int) -> None:
    """Each rank its own alone, whatever groups it has made before."""
    dist.new_group([0, 1])
    halves = [[0, 2], [1, 3]]
    found: list[Any] = [new_group_of(halves, backend="gloo", timeout_s=60) for _ in range(2)]
    mine = [dist.new_group(half) for half in halves][rank % 2]
    found += new_gloo_groups(world_of(60.0), mine, 2, timeout_s=60)
    assert len(found) == 4
    for group in found:
        total = torch.tensor(rank)
        dist.all_reduce(total, group=group)
        assert int(total) == sum(halves[rank % 2])


def give_a_group_of_others(rank: int) -> None:
    """Groups that do not fit each other are an error on all ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2, 3])]
    found = outcome(lambda: new_gloo_groups(world_of(60.0), groups[rank > 0], 1, timeout_s=60))
    assert "StrategyError" in found.kinds, found


def world_of(timeout_s: float) -> Communicator:
    return open_communicator(None, timeout_s=timeout_s, purpose="making of gloo groups")


def stay_in_step(rank: int) -> None:
    for body in (name_global_ranks, make_groups, give_a_group_of_others):
        body(rank)


def test_ranks_that_stay_in_step() -> None:
    assert run_processes(4, stay_in_step) == [None] * 4


# Silent


def meet() -> None:
    """From here on no rank is behind by more than a machine under load makes it. Collective."""
    open_communicator(None, timeout_s=60.0, purpose="a test begins").all_gather(None)


def within_a_step(comm: Communicator) -> None:
    """A failure there must not lead to another collective."""
    run_collectively(comm, lambda: comm.all_gather("early"))


def after_messages_of_two(comm: Communicator) -> None:
    """They leave the other ranks on time."""
    for _ in range(2):
        content = np.zeros(4, np.uint8)
        sends = [(2, content)] if comm.rank == 0 else []
        comm.exchange(sends, [(0, content)] if comm.rank == 2 else [])
    if comm.rank != 2:
        run_collectively(comm, lambda: None)


def waits_for(rank: int, silent: int, body: Callable[[Communicator], None], scratch: Path) -> Any:
    meet()
    comm = open_communicator(None, timeout_s=3.0, purpose="save of /ckpt/iter_1")
    found = None
    if rank != silent or body is after_messages_of_two:
        found = outcome(partial(body, comm))
    if rank == silent:
        until(lambda: len(list(scratch.iterdir())) == 3)  # the others have given up
    else:
        (scratch / f"done.{rank}").touch()
    return found


@pytest.mark.parametrize(("silent", "body"), [(0, within_a_step), (2, after_messages_of_two)])
def test_a_silent_rank_is_named_within_the_timeout(
    silent: int, body: Callable[[Communicator], None], tmp_path: Path
) -> None:
    results = run_processes(4, waits_for, silent, body, tmp_path)

    assert results.pop(silent) is None
    for error in results:
        assert {"PeerTimeoutError", "TimeoutError"} < set(error.kinds), error
        assert error.global_rank == silent
        assert f"ranks [{silent}] did not reach this collective within 3 s" in error.text
        assert "save of /ckpt/iter_1" in error.text
        assert 2.5 < error.seconds < 45.0


def one_receiver_waits_in_vain(rank: int) -> Any:
    meet()
    comm = open_communicator(None, timeout_s=3.0, purpose="a test")
    receives = [(2, np.zeros(4, np.uint8))] if rank == 0 else []
    return None if rank == 2 else outcome(partial(comm.exchange, [], receives))


def test_a_sender_that_is_silent_is_named_to_its_receiver() -> None:
    error, *others = run_processes(4, one_receiver_waits_in_vain)

    assert "PeerTimeoutError" in error.kinds, error
    assert error.global_rank == 2
    assert others == [None] * 3


def arrive_late(rank: int) -> Any:
    """Rank 1 reaches a collective when rank 0 has waited for its whole limit."""
    meet()
    comm = open_communicator(None, timeout_s=1.5, purpose="late")
    run_collectively(comm, lambda: None)
    if rank == 1:
        time.sleep(3.0)
    return outcome(lambda: run_collectively(comm, lambda: None))


def test_a_rank_that_comes_after_the_others_have_given_up_raises_too() -> None:
    for found in run_processes(2, arrive_late):
        assert isinstance(found, Failure), found
        assert "PeerError" in found.kinds


# Killed


def kill_this_process(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def survives(rank: int, killed: int, is_within: bool) -> Any:
    """One is killed before a collective, or when it has reached it."""
    comm = open_communicator(None, timeout_s=60.0, purpose="save of /ckpt/iter_1")
    run_collectively(comm, lambda: None)
    if rank == killed and is_within:
        vars(dist)["all_to_all_single"] = kill_this_process
    elif rank == killed:
        kill_this_process()
    found = outcome(lambda: run_collectively(comm, lambda: None, follows=is_within))
    dist.destroy_process_group()  # as when the error ends the process
    return found


@pytest.mark.parametrize("is_within", [False, True])
def test_a_killed_rank_is_an_error_on_the_others_long_before_the_timeout(is_within: bool) -> None:
    killed = 2
    results = run_processes(4, survives, killed, is_within)

    assert isinstance(results.pop(killed), RankDiedError)
    for error in results:
        assert "PeerLostError" in error.kinds, error
        assert error.seconds < 40.0
        assert "save of /ckpt/iter_1" in error.text
    blamed = {error.global_rank for error in results}
    assert killed in blamed <= {killed, None}


def is_killed_while_it_sends(rank: int) -> Any:
    comm = open_communicator(None, timeout_s=60.0, purpose="a test")
    comm.all_gather(None)
    if rank == 1:
        threading.Timer(0.2, kill_this_process).start()
        time.sleep(60)
    return outcome(lambda: comm.exchange([], [(1, np.zeros(64 << 20, np.uint8))]))


def test_a_rank_killed_in_an_exchange_is_named_to_its_receiver() -> None:
    error, died = run_processes(2, is_killed_while_it_sends)

    assert isinstance(died, RankDiedError)
    assert "PeerLostError" in error.kinds, error
    assert error.global_rank == 1
    assert error.seconds < 40.0


def is_interrupted(rank: int, raised: BaseException, scratch: Path) -> Any:
    """A signal's handler raises on rank 0 in a collective, as torch's for a DataLoader's does."""

    def handler(*_: Any) -> None:
        raise type(raised)(*raised.args)

    def interrupt() -> None:
        until(meeting.is_set)
        os.kill(os.getpid(), signal.SIGUSR1)
        (scratch / "sent").touch()

    meet()
    comm, meeting = open_communicator(None, timeout_s=60.0, purpose="a save"), threading.Event()
    if rank == 0:
        signal.signal(signal.SIGUSR1, handler)
        all_gather: Any = dist.all_gather

        def begin(*args: Any, **options: Any) -> Any:
            meeting.set()
            return all_gather(*args, **options)

        vars(dist)["all_gather"] = begin
        threading.Thread(target=interrupt).start()
    else:
        until((scratch / "sent").exists)
    found: Any = None
    for _ in range(1 + rank):
        try:
            found = outcome(lambda: run_collectively(comm, lambda: None))
        except KeyboardInterrupt as error:
            found = repr(error)
    dist.destroy_process_group()  # as when the error ends the process
    return found


@pytest.mark.parametrize(
    "raised", [RuntimeError("DataLoader worker (pid 7) is killed"), KeyboardInterrupt()], ids=repr
)
def test_what_a_signal_handler_raises_in_a_collective_is_not_taken_for_a_lost_peer(
    raised: BaseException, tmp_path: Path
) -> None:
    interrupted, other = run_processes(2, is_interrupted, raised, tmp_path)

    if isinstance(raised, KeyboardInterrupt):
        assert interrupted == "KeyboardInterrupt()"
    else:
        assert (interrupted.kinds[0], interrupted.text) == ("RuntimeError", str(raised))
    assert "PeerLostError" in other.kinds, other
    assert other.global_rank == 0
    left = f"rank 0 left by an error of its own: {type(raised).__name__}: {raised}"
    assert left in other.text, other


def leaves_in_its_own_step(rank: int) -> Any:
    def step() -> None:
        if rank == 0:
            raise SystemExit("by a handler")

    meet()
    comm = open_communicator(None, timeout_s=60.0, purpose="a save")
    try:
        found: Any = outcome(lambda: run_collectively(comm, step))
    except SystemExit as error:
        found = repr(error)
    dist.destroy_process_group()
    return found


def test_peers_learn_by_what_a_rank_left_in_a_step_of_its_own() -> None:
    left, other = run_processes(2, leaves_in_its_own_step)

    assert left == "SystemExit('by a handler')"
    assert "PeerLostError" in other.kinds, other
    assert "rank 0 left by an error of its own: SystemExit: by a handler" in other.text


def dies_before_its_second_group(rank: int) -> Any:
    make, made = distributed_c10d._new_process_group_helper, [0]

    def die_at_the_second(*args: Any, **options: Any) -> Any:
        made[0] += 1
        if rank == 1 and made[0] == 2:
            kill_this_process()
        return make(*args, **options)

    meet()
    vars(distributed_c10d)["_new_process_group_helper"] = die_at_the_second
    return outcome(lambda: new_gloo_groups(world_of(8.0), None, 2, timeout_s=8.0))


def test_a_rank_that_dies_while_groups_are_made_is_an_error_of_ours() -> None:
    first, died, last = run_processes(3, dies_before_its_second_group)

    assert isinstance(died, RankDiedError)
    for error in (first, last):
        assert "PeerError" in error.kinds, error
        assert "making of a gloo group of 3 ranks" in error.text


def test_ranks_of_a_tool_that_do_not_come_are_not_waited_for(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    with (
        pytest.raises(PeerTimeoutError, match="2 ranks did not find each other within 1 s"),
        open_world(0, 2, store, start_s=1, timeout_s=60),
    ):
        pass
