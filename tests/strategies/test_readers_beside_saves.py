"""What reads a place while a save commits there, is late, or is interrupted itself."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from dist_ckpt_strategies.recovery import load_latest
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.support.entries import Failure, outcome, prepare
from tests.support.ranks import run_processes
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

FORMATS = [("zarr", 1), ("zarr", 2)]
LIMIT_S = 4.0
NUM_ARRAYS = 20
NOTHING = {"CheckpointNotFoundError", "NoUsableCheckpointError"}

each_format = pytest.mark.parametrize("backend", FORMATS, ids=str)


def state_of(value: float) -> dict[str, Any]:
    """Some arrays that rank 0 holds alone; the other ranks have replicas."""
    of_value = partial(ShardedTensor.from_rank_offsets, replica_id=dist.get_rank())
    return {f"w{n}": of_value(f"w{n}", torch.full((64,), value)) for n in range(NUM_ARRAYS)}


def values_in(root: Path) -> Any:
    """The values of a checkpoint, or the Failure of its load."""
    wanted = state_of(-1.0)
    found = outcome(lambda: dist_ckpt_strategies.load(wanted, root))
    if isinstance(found, Failure):
        return found
    return sorted({float(x) for name in wanted for x in found[name].unique()})


def slow_call(name: str, directory: str, seconds: float) -> AbstractContextManager[None]:
    return before_calls(lambda _, path: time.sleep(seconds if directory in path else 0.0), [name])


# Readers beside a save that commits


def save_beside_a_reader(rank: int, root: Path, backend: Any) -> list[Any]:
    prepare(60)
    found: list[Any] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            found.append(outcome(lambda: load_latest(None, [root.parent])))

    dist_ckpt_strategies.save(state_of(0), root, backend)
    reader = threading.Thread(target=look)
    reader.start()
    with slow_call("rename", str(root), 0.001):
        for value in range(1, 12):
            dist_ckpt_strategies.save(state_of(value), root, backend, overwrite=True)
    is_over.set()
    reader.join()
    # In the middle of a commit there may be nothing to load.
    odd = {str(one) for one in found if isinstance(one, Failure) and not NOTHING & {*one.kinds}}
    return [*odd, values_in(root)]


@each_format
def test_a_save_and_who_looks_at_it_leave_each_other_alone(tmp_path: Path, backend: Any) -> None:
    (found,) = run_processes(1, save_beside_a_reader, tmp_path / "iter_1", backend)

    assert found == [[11.0]]


def complete_together(rank: int, root: Path, backend: Any) -> Any:
    prepare(60)
    done = root.with_name("done")
    dist_ckpt_strategies.save(state_of(1.0), done, backend)
    staging = root / ".partial-0123"
    shutil.copytree(done, staging)
    (staging / ".commit-lock").touch()
    with slow_call("rename", str(root), 0.005), ThreadPoolExecutor(3) as pool:
        found = [pool.submit(outcome, partial(load_latest, None, [root])) for _ in range(3)]
        failed = [one.result() for one in found if isinstance(one.result(), Failure)]
    return failed, values_in(root), sorted(path.name for path in root.glob(".*"))


@each_format
def test_several_readers_complete_one_commit(tmp_path: Path, backend: Any) -> None:
    (found,) = run_processes(1, complete_together, tmp_path / "iter_1", backend)

    assert found == ([], [1.0], [])


def search_beside_what_cannot_be_completed(rank: int, root: Path) -> Any:
    prepare(60)
    dist_ckpt_strategies.save(state_of(1.0), root / "iter_0000001")
    dist_ckpt_strategies.save(state_of(2.0), root / "iter_0000002")
    last = root / "iter_0000002"
    staging = last / ".partial-0123"
    staging.mkdir()
    (last / "metadata.json").rename(staging / "metadata.json")
    (staging / ".commit-lock").mkdir()  # no lock can be had
    state = state_of(-1.0)
    found = load_latest(None, [root], partial(dist_ckpt_strategies.load, state))
    return found.iteration, [attempt.iteration for attempt in found.attempts]


def test_a_commit_that_cannot_be_completed_does_not_hide_older_checkpoints(tmp_path: Path) -> None:
    (found,) = run_processes(1, search_beside_what_cannot_be_completed, tmp_path)

    assert found == (1, [2])


# Loads whose peers are late, or that are interrupted


def load_late(rank: int, root: Path) -> list[Any]:
    """One rank begins later than storage may take, and sooner than a peer may."""
    prepare(60)
    dist_ckpt_strategies.save(state_of(1.0), root)
    manager = LocalCheckpointManager(root.with_name("local"), timeout_s=LIMIT_S)
    manager.save(BasicTensorAwareStateDict({"x": torch.ones(10) * rank}), 5, is_async=False)
    strategy = TwoStageDataParallelLoadShardedStrategy(None, timeout_s=LIMIT_S)
    loads: list[Callable[[], Any]] = [
        lambda: dist_ckpt_strategies.load(state_of(0.0), root, timeout_s=LIMIT_S),
        lambda: strategy.load(state_of(0.0), root),
        manager.load,
    ]
    found = []
    for load in loads:
        dist.barrier()
        time.sleep(0.85 * LIMIT_S * rank)
        found.append(outcome(load))
    return [one for one in found if isinstance(one, Failure)]


def test_a_peer_that_is_late_is_not_taken_for_silent_storage(tmp_path: Path) -> None:
    assert run_processes(2, load_late, tmp_path / "c") == [[], []]


class Interruption(BaseException):
    """What a signal handler raises."""


def interrupt_a_load(rank: int, root: Path, backend: Any) -> Any:
    prepare(60)
    dist_ckpt_strategies.save(state_of(1.0), root, backend)

    def interrupt(*_: object) -> None:
        raise Interruption

    signal.signal(signal.SIGALRM, interrupt)
    state = state_of(0.0)
    with slow_call("preadv", str(root), 0.2):
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Interruption):
            dist_ckpt_strategies.load(state, root)
        time.sleep(0.5)  # for the calls that were under way
        for tensor in state.values():
            tensor.data.fill_(-1.0)
        time.sleep(2.0)
    return {float(x) for tensor in state.values() for x in tensor.data.unique()}


@each_format
def test_an_interrupted_load_leaves_the_tensors_alone_afterwards(
    tmp_path: Path, backend: Any
) -> None:
    (found,) = run_processes(1, interrupt_a_load, tmp_path / "c", backend)

    assert found == {-1.0}
