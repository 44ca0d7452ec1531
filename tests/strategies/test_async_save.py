"""Saves that go on behind training: what is overwritten meanwhile, what fails, what waits."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    CoverageError,
    PlanError,
    SaveTimeoutError,
    StorageError,
)
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.support.entries import Entry, load, outcome, prepare, require_failure_everywhere
from tests.support.layouts import irregular, irregular_otherwise
from tests.support.processes import is_running, until
from tests.support.queues import GLOBAL, run_queue
from tests.support.ranks import RankDiedError, run_processes
from tests.support.sharding import differences, no_data, on_grid, state_of

pytestmark = pytest.mark.multiprocess

FORMATS = [("zarr", 1), ("zarr", 2)]
by_format = pytest.mark.parametrize("backend", FORMATS, ids=["format1", "format2"])


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_queue(tmp_path_factory.mktemp("queue"), "megatron", GLOBAL)


@pytest.mark.parametrize("mode", ["temporal", "persistent"])
def test_megatrons_queue_finalises_saves_of_both_formats(mode: str, printed: str) -> None:
    for rank in range(2):
        for what in ("zarr 1: saved", "zarr 2: saved", "wrapped: saved"):
            assert f"{mode}, rank {rank}: {what} True" in printed
        for version in (1, 2):
            assert f"{mode}, rank {rank}: zarr {version}: refused True: rank 1: " in printed


def save_and_overwrite(rank: int, root: Path, backend: tuple[str, int]) -> list[str]:
    """Two saves of everything, overwritten at once; what came back wrong."""
    prepare(60)
    cuts = [*irregular(), on_grid("grid", (64, 32), (2, 2))]
    wanted = [*irregular_otherwise(), on_grid("grid", (64, 32), (4, 1))]
    wrong = []
    for name in ("first", "second"):
        state: dict[str, Any] = state_of(rank, cuts)
        step = {"iteration": torch.tensor(7)}
        objects = {"o": ShardedObject("o", {"t": torch.full((3,), rank)}, (4,), (rank,))}
        handle = dist_ckpt_strategies.save_async(state | step | objects, root / name, backend)
        for value in state.values():
            value.data.zero_()
        step["iteration"].zero_()
        objects["o"].data["t"].zero_()
        if (root / name / "metadata.json").exists():
            wrong.append(f"{name}: visible before it was waited for")
        handle.wait()
        handle.wait()  # once more changes nothing
        asked = {"o": ShardedObject("o", None, (4,), (rank,))}
        two_stage = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD)
        for how in ({}, {"sharded_strategy": two_stage}):
            loaded = load(Entry.OURS, state_of(rank, wanted, no_data) | asked, root / name, **how)
            wrong += [f"{name}: {key}" for key in differences(rank, wanted, loaded)]
            if loaded["iteration"] != 7 or not torch.equal(
                loaded["o"]["t"], torch.full((3,), rank)
            ):
                wrong.append(f"{name}: {loaded['iteration']} {loaded['o']}")
    return wrong


@by_format
def test_tensors_may_be_overwritten_as_soon_as_the_call_returns(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    assert run_processes(4, save_and_overwrite, tmp_path, backend) == [[]] * 4


def weight(rank: int, rows: int = 30_000) -> dict[str, Any]:
    tensor = torch.arange(float(rows)) + rank
    return {"w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, dist.get_world_size()))}


def fail_on_one_rank(rank: int, root: Path, backend: tuple[str, int]) -> list[Any]:
    """Rank 2 cannot write more than a few bytes a file."""
    prepare(60)
    dist_ckpt_strategies.save_async(weight(rank), root / "good", backend).wait()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    (writer,) = psutil.Process().children()
    if rank == 2:
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1000, limit[1]))
    handle = dist_ckpt_strategies.save_async(weight(rank), root / "bad", backend)
    found = [outcome(handle.wait), outcome(handle.wait)]
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, limit)
    dist_ckpt_strategies.save_async(weight(rank), root / "again", backend).wait()
    return [*found, (root / "bad" / "metadata.json").exists()]


@by_format
def test_a_failure_in_the_background_reaches_every_rank_and_nothing_becomes_visible(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    results = run_processes(4, fail_on_one_rank, tmp_path, backend)

    for attempt in range(2):  # the second time the same is raised
        require_failure_everywhere(
            [found[attempt] for found in results], kind=StorageError, culprit=2, names=["w", "bad"]
        )
    assert [found[2] for found in results] == [False] * 4
    assert (tmp_path / "again" / "metadata.json").exists()


def lose_the_writer(rank: int, root: Path, backend: tuple[str, int]) -> list[Any]:
    """The process that writes for rank 1 is killed in the middle of a save."""
    prepare(60)
    dist_ckpt_strategies.save_async(weight(rank), root / "good", backend).wait()
    (writer,) = psutil.Process().children()
    if rank == 1:
        writer.suspend()
    handle = dist_ckpt_strategies.save_async(weight(rank), root / "bad", backend)
    if rank == 1:
        writer.kill()
    found = [outcome(handle.wait)]
    dist_ckpt_strategies.save_async(weight(rank), root / "again", backend).wait()
    (successor,) = psutil.Process().children()
    return [*found, (root / "bad" / "metadata.json").exists(), successor.pid == writer.pid]


@by_format
def test_a_writing_process_that_is_killed_fails_its_save_and_is_replaced(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    results = run_processes(2, lose_the_writer, tmp_path, backend)

    require_failure_everywhere(
        [found[0] for found in results],
        kind=StorageError,
        culprit=1,
        names=["was killed by signal 9"],
    )
    assert [found[1:] for found in results] == [[False, True], [False, False]]
    assert (tmp_path / "again" / "metadata.json").exists()


def write_by_threads(rank: int, root: Path, backend: tuple[str, int]) -> tuple[int, bool]:
    """Where a process of its own is not wanted."""
    os.environ["DIST_CKPT_WRITER_PROCESS"] = "0"
    prepare(60)
    dist_ckpt_strategies.save_async(weight(rank), root, backend).wait()
    wanted = weight(rank)
    expected = wanted["w"].data.clone()
    wanted["w"].data.zero_()
    is_equal = torch.equal(load(Entry.OURS, wanted, root)["w"], expected)
    return len(psutil.Process().children()), is_equal


@by_format
def test_threads_write_where_that_is_asked_for(backend: tuple[str, int], tmp_path: Path) -> None:
    found = run_processes(2, write_by_threads, tmp_path / "c", backend)

    assert found == [(0, True)] * 2


def change_the_structure(rank: int, root: Path, backend: tuple[str, int]) -> list[Any]:
    """The same shards again, others, none on one rank alone, and the first ones again."""
    prepare(60)
    found = []
    for number, rows in enumerate((100, 100, 60, 0, 100)):
        wanted = weight(rank, rows or 60) if rows or rank != 1 else {}
        save = partial(dist_ckpt_strategies.save_async, wanted, root / str(number), backend)
        if rows == 0:
            found.append(CoverageError.__name__ in outcome(save).kinds)
            continue
        save().wait()
        expected = wanted["w"].data.clone()
        wanted["w"].data.zero_()
        found.append(torch.equal(load(Entry.OURS, wanted, root / str(number))["w"], expected))
    return found


@by_format
def test_a_changed_structure_is_never_saved_by_an_old_plan(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    assert run_processes(2, change_the_structure, tmp_path, backend) == [[True] * 5] * 2


def save_while_one_runs(
    rank: int, root: Path, register: Callable[[], None] | None, backend: tuple[str, int]
) -> list[Any]:
    """The second save begins while the first one still writes, into memory that both use."""
    os.environ["DIST_CKPT_TIMEOUT_S"] = "60"
    if register is not None:
        register()
    first = dist_ckpt_strategies.save_async(weight(rank, 3_000_000), root / "1", backend)
    second = dist_ckpt_strategies.save_async(weight(rank, 3_000_000), root / "2", backend)
    num_writers = len(psutil.Process().children())
    was_done = first.done()
    for handle in (first, second):
        handle.wait()
    found = []
    for name in ("1", "2"):
        wanted = weight(rank, 3_000_000)
        expected = wanted["w"].data.clone()
        wanted["w"].data.zero_()
        found.append(torch.equal(load(Entry.OURS, wanted, root / name)["w"], expected))
    return [was_done, num_writers == 1, *found, threading.active_count() < 20]


@by_format
@pytest.mark.parametrize(
    "register",
    [None, dist_ckpt_strategies.register, dist_ckpt_strategies.register_default_zarr_strategies],
    ids=["not registered", "register", "register_default_zarr_strategies"],
)
def test_a_save_waits_until_the_one_before_has_written_its_share(
    register: Callable[[], None] | None, backend: tuple[str, int], tmp_path: Path
) -> None:
    found = run_processes(2, save_while_one_runs, tmp_path, register, backend)
    assert found == [[True] * 5] * 2


def overtake(rank: int, root: Path, way: str, backend: tuple[str, int]) -> list[Any]:
    """Another save to the same directory begins while the writing process is held up.

    ``way``: the first is waited for first, the later one is, or the later one is synchronous.
    """
    prepare(60)
    dist_ckpt_strategies.save_async(weight(rank), root.with_name("good"), backend).wait()
    (writer,) = psutil.Process().children()
    if rank == 1:
        writer.suspend()
        threading.Timer(0.5, writer.resume).start()
    first = dist_ckpt_strategies.save_async(weight(rank) | {"iteration": 1}, root, backend)
    later = weight(rank) | {"iteration": 2}
    later["w"].data.neg_()
    if way == "sync":
        dist_ckpt_strategies.save(later, root, backend)
        failure = outcome(first.wait)
    else:
        second = dist_ckpt_strategies.save_async(later, root, backend)
        if way == "later first":
            second.wait()
        failure = outcome(first.wait)
        if way == "first first":
            assert not (root / "metadata.json").exists()
            second.wait()
    loaded = load(Entry.OURS, weight(rank), root)
    return [failure, torch.equal(loaded["w"], later["w"].data), loaded["iteration"]]


@by_format
@pytest.mark.parametrize("way", ["first first", "later first", "sync"])
def test_a_save_that_another_one_has_overtaken_is_not_made_visible(
    way: str, backend: tuple[str, int], tmp_path: Path
) -> None:
    results = run_processes(2, overtake, tmp_path / "c", way, backend)

    require_failure_everywhere(
        [found[0] for found in results],
        kind=StorageError,
        culprit=None,  # the second rank may still have been writing when that began
        names=["another save to it has begun", str(tmp_path / "c")],
    )
    assert [found[1:] for found in results] == [[True, 2]] * 2
    assert not list((tmp_path / "c").glob(".partial-*"))


def lose_place(rank: int, root: Path, backend: tuple[str, int]) -> list[Any]:
    """What was staged goes, and a late write makes the directory again."""
    prepare(60)
    request = dist_ckpt_strategies.save_async(weight(rank), root, backend)
    while not request.done():
        time.sleep(0.01)
    (staged,) = root.glob(".partial-*")
    shutil.rmtree(staged)
    (staged / "w").mkdir(parents=True)
    return [outcome(request.wait), (root / "metadata.json").exists()]


@by_format
def test_a_save_that_has_lost_its_place_is_not_made_visible(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    ((failure, is_visible),) = run_processes(1, lose_place, tmp_path / "c", backend)
    names = ["another save to it has begun", str(tmp_path / "c")]
    require_failure_everywhere([failure], kind=StorageError, culprit=0, names=names)
    assert not is_visible


class HandlerError(Exception):
    """What a signal's handler raises."""


def interrupt_a_wait(rank: int, root: Path) -> list[Any]:
    """A signal's handler raises in the middle of waiting for a save; later it is waited for."""
    prepare(60)
    dist_ckpt_strategies.save_async(weight(rank), root / "good", ("zarr", 2)).wait()
    (writer,) = psutil.Process().children()
    writer.suspend()
    handle = dist_ckpt_strategies.save_async(weight(rank), root / "c", ("zarr", 2))

    def interrupt(*_: Any) -> None:
        raise HandlerError

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(HandlerError):
        handle.wait()
    was_done = handle.done()
    writer.resume()
    handle.wait()
    loaded = load(Entry.OURS, weight(rank), root / "c")
    return [was_done, torch.equal(loaded["w"], weight(rank)["w"].data)]


def test_a_wait_that_a_signal_interrupts_does_not_end_the_save(tmp_path: Path) -> None:
    assert run_processes(1, interrupt_a_wait, tmp_path) == [[False, True]]


def end_in_odd_ways(rank: int, root: Path) -> list[Any]:
    """A wait that is too short on all ranks, and saves that ranks end in another order."""
    prepare(60)
    dist_ckpt_strategies.save_async(weight(rank), root / "good").wait()
    (writer,) = psutil.Process().children()
    if rank == 1:
        writer.suspend()
    slow = dist_ckpt_strategies.save_async(weight(rank), root / "slow")
    late = outcome(partial(slow.wait, 0.1))
    writer.resume()
    slow.wait()
    handles = [dist_ckpt_strategies.save_async(weight(rank), root / name) for name in "ab"]
    odd = outcome(handles[rank == 1].wait)
    for handle in handles:
        handle.wait()
    return [late, odd, sorted(path.parent.name for path in root.glob("*/metadata.json"))]


def test_a_save_may_be_waited_for_again_after_a_wait_that_failed_on_all_ranks(
    tmp_path: Path,
) -> None:
    late, odd, saved = zip(*run_processes(3, end_in_odd_ways, tmp_path), strict=True)

    for failure in late:
        assert SaveTimeoutError.__name__ in failure.kinds, failure
        assert "the save is not done after 0.1 s" in failure.text
    for failure in odd:
        assert PlanError.__name__ in failure.kinds, failure
        assert "to end their saves in the same order" in failure.text
    assert list(saved) == [["a", "b", "good", "slow"]] * 3


def die_beside_a_writer(rank: int, root: Path) -> None:
    prepare(60)
    dist_ckpt_strategies.save_async(weight(rank), root / "good").wait()
    (writer,) = psutil.Process().children()
    (root / "pid").write_text(str(writer.pid))
    dist_ckpt_strategies.save_async(weight(rank, 3_000_000), root / "bad")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_process_that_writes_ends_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    (died,) = run_processes(1, die_beside_a_writer, tmp_path)

    assert isinstance(died, RankDiedError)
    until(lambda: not is_running(int((tmp_path / "pid").read_text())))
    assert not (tmp_path / "bad" / "metadata.json").exists()


def save_by_request(rank: int, root: Path) -> list[Any]:
    """What ``save`` returns where a request is asked for; the request makes it visible."""
    prepare(60)
    request = dist_ckpt_strategies.save(
        weight(rank, 50), root, ("zarr", 2), async_sharded_save=True
    )
    assert request is not None
    was_visible = (root / "metadata.json").exists()
    request.execute_sync()
    wanted = weight(rank, 50)
    expected = wanted["w"].data.clone()
    wanted["w"].data.zero_()
    return [was_visible, torch.equal(load(Entry.OURS, wanted, root)["w"], expected)]


def test_save_returns_a_request_where_one_is_asked_for(tmp_path: Path) -> None:
    assert run_processes(2, save_by_request, tmp_path / "c") == [[False, True]] * 2
