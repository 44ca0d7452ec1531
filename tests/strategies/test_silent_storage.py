"""Storage that does not answer on one rank of four: every rank raises that in time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies import load_latest
from dist_ckpt_strategies.errors import StorageTimeoutError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.support import sharding
from tests.support.entries import FORMATS, Failure, outcome, require_on_ranks
from tests.support.ranks import run_processes
from tests.support.sharding import on_grid
from tests.support.silence import silent_disk
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess
each_format = pytest.mark.parametrize("backend", FORMATS, ids=str)

NUM_RANKS = 4
CULPRIT = 2
TIMEOUT_S = 4.0
MARGIN_S = 2.0
FIRST_CALLS = (0, 12)
SLOW_S = 0.2 * TIMEOUT_S
"""What the first call takes before a later one goes silent."""


def state_of(rank: int) -> dict[str, Any]:
    """Three arrays that all ranks share, an object for each rank, and common state."""
    size = dist.get_world_size()
    cuts = [on_grid(name, (size << 16,), (size,), size=size) for name in "abc"]
    own = {"object": ShardedObject("object", [rank], (size,), (rank,)), "iteration": 1}
    return sharding.state_of(rank, cuts) | own


def with_silence(
    rank: int, directory: Path, first: int, act: Callable[[], Any], slow_s: float = 0.0
) -> Any:
    """The outcome where one rank's disk goes silent after so many calls; None: it never did."""
    dist.barrier()
    with ExitStack() as stack:
        disk = None
        if rank == CULPRIT:
            disk = stack.enter_context(silent_disk(directory, first, slow_s))
        found = outcome(act)
        dist.barrier()
        was_silent = [disk is not None and disk.has_blocked]
    dist.broadcast_object_list(was_silent, src=CULPRIT)
    return found if was_silent[0] else None


def require_all_raised(found: list[list[Any]]) -> None:
    failures = [one for of_rank in found for one in of_rank if one is not None]
    assert failures
    for failure in failures:
        assert isinstance(failure, Failure), failure
        assert StorageTimeoutError.__name__ in failure.kinds, failure
        assert failure.seconds < TIMEOUT_S + MARGIN_S, failure


def uses_global(rank: int, root: str, backend: tuple[str, int]) -> list[Any]:
    """Saves and loads, each with another call that is the first to block.

    The limit is for all calls together: a slow one before that does not add to it.
    """
    os.environ["DIST_CKPT_WRITER_PROCESS"] = "0"
    os.environ["DIST_CKPT_TIMEOUT_S"] = str(TIMEOUT_S)
    loaded = []

    def save(directory: Path, timeout_s: float | None = None) -> None:
        dist_ckpt_strategies.save(state_of(rank), directory, backend, timeout_s=timeout_s)

    def save_in_background(directory: Path) -> None:
        dist_ckpt_strategies.save_async(state_of(rank), directory, backend).wait()

    def load(directory: Path) -> None:
        loaded.append(directory)
        dist_ckpt_strategies.load(state_of(rank), directory)

    def load_newest(directory: Path) -> None:
        load_latest(None, [directory.parent], load)

    found = []
    for first in FIRST_CALLS:
        for act in (save, save_in_background, load, load_newest):
            top = Path(root) / f"{act.__name__} {first}"
            for iteration in (1, 2) if act in {load, load_newest} else ():
                save(top / f"iter_{iteration}", timeout_s=60)
            slow_s = SLOW_S if first == FIRST_CALLS[-1] else 0.0
            call = partial(act, top / "iter_2")
            found.append(with_silence(rank, top / "iter_2", first, call, slow_s))
    assert {path.name for path in loaded} == {"iter_2"}, "it fell back on another checkpoint"
    return found


@each_format
def test_saves_and_loads_raise_on_every_rank_in_time(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    require_all_raised(run_processes(NUM_RANKS, uses_global, str(tmp_path), backend))


def uses_local(rank: int, root: str) -> list[Any]:
    node = Path(root) / f"node{rank}"
    state = BasicTensorAwareStateDict({"w": torch.full((1 << 20,), float(rank))})

    def manager() -> LocalCheckpointManager:
        cliques = CliqueReplicationStrategy.from_replication_params(1, 2, timeout_s=TIMEOUT_S)
        return LocalCheckpointManager(node, repl_strategy=cliques, timeout_s=TIMEOUT_S)

    seen = []
    for number, first in enumerate(FIRST_CALLS):
        manager().save(state, 2 * number)
        save = partial(manager().save, state, 2 * number + 1)
        seen.append(with_silence(rank, node, first, save))
        seen.append(with_silence(rank, node, first, manager().load))
    return seen


def test_local_saves_and_loads_raise_on_every_rank_in_time(tmp_path: Path) -> None:
    require_all_raised(run_processes(NUM_RANKS, uses_local, str(tmp_path)))


def uses_all(rank: int, root: str) -> set[str]:
    """Every way to save and load; where the main thread asks the disk."""
    state, where = partial(state_of, rank), Path(root)
    node = where / f"node{rank}"
    cliques = CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = LocalCheckpointManager(node, repl_strategy=cliques)
    with silent_disk(where, sys.maxsize) as disk:
        for number, strategy in enumerate(FORMATS, 1):
            path = where / "global" / f"iter_{number}"
            dist_ckpt_strategies.save_async(state(), path, strategy).wait()
            dist_ckpt_strategies.save(state(), path, strategy, overwrite=True)
            load = partial(dist_ckpt_strategies.load, state())
            two_stage = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD)
            load(path, two_stage)
            load_latest(None, [where / "global"], load)
            load_latest(None, [where / "global"])
        load(path, verify="read")
        for is_async in (False, True):
            request = manager.save(BasicTensorAwareStateDict({"w": torch.ones(9)}), 3, is_async)
            if request is not None:
                request.wait()
        load_latest(manager, [])
        dist_ckpt_strategies.register(local=dist_ckpt_strategies.LocalOptions(replication_jump=1))
        dist_ckpt_strategies.save(state(), where / "on_nodes", ("local_replicated", 1))
        load(where / "on_nodes")
    return disk.on_main_thread


def test_no_system_call_is_made_on_the_main_thread(tmp_path: Path) -> None:
    for found in run_processes(2, uses_all, str(tmp_path)):
        assert found == set()


_EXITS = """
import sys
import torch
from dist_ckpt_strategies.errors import StorageTimeoutError
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.silence import silent_disk

disk = silent_disk(sys.argv[1], int(sys.argv[2]))
disk.__enter__()  # until the process ends
try:
    state = BasicTensorAwareStateDict({"w": torch.ones(1 << 20)})
    LocalCheckpointManager(sys.argv[1], timeout_s=2).save(state, 1)
except StorageTimeoutError:
    print("raised", flush=True)
"""


def test_the_process_ends_though_a_thread_still_waits_for_the_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _EXITS, str(tmp_path), str(FIRST_CALLS[-1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "raised\n"


def test_a_shard_that_gets_its_name_after_its_save_was_given_up_is_removed(tmp_path: Path) -> None:
    is_back, is_over, renaming = threading.Event(), threading.Event(), []

    def wait(name: str, _: str) -> None:
        if name == "replace":
            renaming.append(threading.current_thread())
            is_back.wait(20.0)
        elif threading.current_thread() not in renaming:
            is_over.wait(20.0)  # the removal of what was written

    state = BasicTensorAwareStateDict({"w": torch.ones(9)})
    try:
        with before_calls(wait, ["replace", "unlink"]):
            with pytest.raises(StorageTimeoutError):
                LocalCheckpointManager(tmp_path, timeout_s=8).save(state, 1)
            is_back.set()
            for thread in renaming:
                thread.join()
        assert (len(renaming), LocalCheckpointManager(tmp_path).find_latest()) == (1, -1)
    finally:
        is_over.set()


# Loads whose peers are late, or that are interrupted


def load_late(rank: int, root: Path) -> None:
    """One rank begins later than storage may take, and sooner than a peer may."""
    timeout_s = 2 * TIMEOUT_S  # 2 s between these two
    dist_ckpt_strategies.save(state_of(rank), root)
    manager = LocalCheckpointManager(root.with_name("local"), timeout_s=timeout_s)
    manager.save(BasicTensorAwareStateDict({"x": torch.ones(10) * rank}), 5, is_async=False)
    strategy = TwoStageDataParallelLoadShardedStrategy(None, timeout_s=timeout_s)
    load = partial(dist_ckpt_strategies.load, state_of(rank), root)
    for act in (partial(load, timeout_s=timeout_s), partial(load, strategy), manager.load):
        dist.barrier()
        time.sleep(0.8 * timeout_s * rank)
        act()


def test_a_peer_that_is_late_is_not_taken_for_silent_storage(tmp_path: Path) -> None:
    require_on_ranks(2, load_late, tmp_path / "c")


class Interruption(BaseException):
    """What a signal handler raises."""


def interrupt(*_: object) -> None:
    raise Interruption


def interrupt_a_load(rank: int, root: Path, backend: tuple[str, int]) -> None:
    """The tensors are left alone afterwards: many small ones, and two that take many calls each."""
    new, names = ShardedTensor.from_rank_offsets, [f"w{number}" for number in range(20)]
    small = {key: new(key, torch.ones(64)) for key in names}
    dist_ckpt_strategies.save(small | {"w": new("w", torch.ones(128, 1 << 16))}, root, backend)
    halves = {half: new("w", torch.ones(128, 1 << 15), (1, n, 2)) for n, half in enumerate("ab")}
    state = halves | small
    signal.signal(signal.SIGALRM, interrupt)
    begun: list[str] = []

    def delay(_: str, path: str) -> None:
        if str(root) in path:
            begun.append(path)
            time.sleep(0.2)

    with before_calls(delay, ["preadv"]):
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Interruption):
            dist_ckpt_strategies.load(state, root)
        time.sleep(0.5)
        num_begun = len(begun)
        time.sleep(2.0)  # for the calls that were under way
        for tensor in state.values():
            tensor.data.fill_(-1.0)
        time.sleep(2.0)
    assert len(begun) == num_begun
    assert all(bool((tensor.data == -1.0).all()) for tensor in state.values())


@each_format
def test_an_interrupted_load_leaves_the_tensors_alone_afterwards(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    require_on_ranks(1, interrupt_a_load, tmp_path / "c", backend)
