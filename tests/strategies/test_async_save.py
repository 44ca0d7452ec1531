"""Saves in the background: what is overwritten meanwhile, what fails, what waits."""

import ctypes
import os
import resource
import shutil
import signal
import threading
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
from dist_ckpt_strategies.errors import CoverageError, PlanError, StorageError, StorageTimeoutError
from tests.support.entries import (
    FORMATS,
    PACKS,
    ZARR,
    Entry,
    load,
    require_on_ranks,
    require_refused,
)
from tests.support.layouts import irregular, irregular_otherwise
from tests.support.processes import is_running, until
from tests.support.ranks import RankDiedError, run_processes
from tests.support.sharding import differences, no_data, on_grid, state_of

pytestmark = pytest.mark.multiprocess

Backend = tuple[str, int]
save_async = dist_ckpt_strategies.save_async
OVERTAKEN = "another save to it started before this one ended"


def weight(rank: int, rows: int = 30_000) -> dict[str, Any]:
    tensor = torch.arange(float(rows)) + rank
    return {"w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, dist.get_world_size()))}


def is_saved(rank: int, root: Path, rows: int = 30_000) -> bool:
    wanted = weight(rank, rows)
    expected = wanted["w"].data.clone()
    wanted["w"].data.zero_()
    return torch.equal(load(Entry.OURS, wanted, root)["w"], expected)


def writer() -> Any:
    (found,) = psutil.Process().children()
    return found


def a_niced_job_saves_though_it_cannot_raise_its_priority(rank: int, root: Path) -> None:
    """By a writer process and by threads; a priority that was low before stays so."""
    without_capability(23)  # CAP_SYS_NICE
    before = os.nice(11 + 8 * (rank % 2))
    with pytest.raises(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 10)
    for number in range(6):
        os.environ["DIST_CKPT_WRITER_PROCESS"] = str(1 - number // 3)
        place = root / str(number)
        save_async(weight(rank), place, FORMATS[number % 2]).wait()
        assert is_saved(rank, place)
        assert {child.nice() for child in psutil.Process().children()} == {before}
    assert os.nice(0) == before


def without_capability(number: int) -> None:
    """This thread, and what it starts, goes without, as a job of no root does."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(24, number, 0, 0, 0) == 0  # PR_CAPBSET_DROP: of what it starts
    assert libc.capget(header, data) == 0
    for field in range(3):
        data[field] &= ~(1 << number)
    assert libc.capset(header, data) == 0


def a_save_waits_until_the_one_before_has_written_its_share(
    rank: int, root: Path, backend: Backend
) -> None:
    """It begins while the first one still writes, from memory that both use."""
    handles = [save_async(weight(rank, 3_000_000), root / name, backend) for name in "ab"]
    assert handles[0].done()
    for handle in handles:
        handle.wait()
    assert all(is_saved(rank, root / name, 3_000_000) for name in "ab")
    assert threading.active_count() < 20


def tensors_may_be_overwritten_as_soon_as_the_call_returns(
    rank: int, root: Path, backend: Backend
) -> None:
    cuts = [*irregular(), on_grid("grid", (64, 32), (2, 2))][-1 if backend == ZARR else 0 :]
    wanted = [*irregular_otherwise(), on_grid("grid", (64, 32), (4, 1))][-len(cuts) :]
    for name in ("first", "second"):
        state: dict[str, Any] = state_of(rank, cuts)
        step = {"iteration": torch.tensor(7)}
        objects = {"o": ShardedObject("o", {"t": torch.full((3,), rank)}, (4,), (rank,))}
        handle = save_async(state | step | objects, root / name, backend)
        for value in state.values():
            value.data.zero_()
        step["iteration"].zero_()
        objects["o"].data["t"].zero_()
        assert not (root / name / "metadata.json").exists()
        handle.wait()
        handle.wait()  # once more changes nothing
        asked = {"o": ShardedObject("o", None, (4,), (rank,))}
        loaded = load(Entry.OURS, state_of(rank, wanted, no_data) | asked, root / name)
        assert differences(rank, wanted, loaded) == []
        assert (int(loaded["iteration"]), loaded["o"]["t"].tolist()) == (7, [rank] * 3)


def a_failure_reaches_every_rank_and_publishes_nothing(
    rank: int, root: Path, backend: Backend
) -> None:
    """Rank 2 cannot write more than a few bytes a file; then its writer is killed."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.prlimit(writer().pid, resource.RLIMIT_FSIZE, (1000, limit[1]))
    handle = save_async(weight(rank), root / "bad", backend)
    for _ in range(2):  # the second time the same is raised
        key = () if backend == PACKS else ("w",)  # a pack holds many
        require_refused(handle.wait, StorageError, "rank 2: ", *key, "bad", global_rank=2)
    resource.prlimit(writer().pid, resource.RLIMIT_FSIZE, limit)
    before = writer()
    if rank == 2:
        before.suspend()
    handle = save_async(weight(rank), root / "killed", backend)
    if rank == 2:
        before.kill()
    require_refused(handle.wait, StorageError, "was killed by signal 9", global_rank=2)
    save_async(weight(rank), root / "again", backend).wait()
    assert (writer().pid == before.pid) == (rank != 2), "only that one is replaced"
    assert is_saved(rank, root / "again")
    assert [path.parent.name for path in root.glob("*/metadata.json")] == ["again"]


def a_changed_structure_is_never_saved_by_an_old_plan(
    rank: int, root: Path, backend: Backend
) -> None:
    """The same shards again, others, none on one rank alone, and the first ones again."""
    for number, rows in enumerate((100, 100, 60, 0, 100)):
        if rows:
            save_async(weight(rank, rows), root / str(number), backend).wait()
            assert is_saved(rank, root / str(number), rows)
        else:
            gap = weight(rank, 60) if rank != 1 else {}
            require_refused(partial(save_async, gap, root / "gap", backend), CoverageError)


def hold_up_the_writer(*, is_here: bool) -> None:
    if is_here:
        writer().suspend()
        threading.Timer(0.5, writer().resume).start()


def a_save_that_another_one_has_overtaken_is_not_made_visible(
    rank: int, top: Path, backend: Backend
) -> None:
    """It begins while a writing process is held up, in the same directory.

    Of ("zarr", 1), which is not asked to replace anything, the one that ends first stays.
    """
    said = OVERTAKEN if backend == PACKS else "already holds a finished checkpoint"
    for way in ("first first", "later first", "sync"):
        root, is_first = top / way, way == "first first"
        hold_up_the_writer(is_here=rank == 1)
        first = save_async(weight(rank) | {"iteration": 1}, root, backend)
        later = weight(rank) | {"iteration": 2}
        later["w"].data.neg_()
        if way == "sync":
            dist_ckpt_strategies.save(later, root, backend)
        else:
            second = save_async(later, root, backend)
        if way == "later first":
            second.wait()
        if is_first:
            first.wait()  # it is not in the way of the other
        else:
            require_refused(first.wait, StorageError, said, str(root))
        if is_first and backend == PACKS:
            second.wait()
        elif is_first:
            require_refused(second.wait, StorageError, said, str(root))
        last = {"w": weight(rank)["w"], "iteration": 1} if is_first and backend == ZARR else later
        loaded = load(Entry.OURS, weight(rank), root)
        found = torch.equal(loaded["w"], last["w"].data), loaded["iteration"]
        assert found == (True, last["iteration"]), (way, found)
        dist.barrier()
        assert not list(root.glob(".partial-*"))
        assert len(list(root.glob("packs/*/*"))) == 4 * (backend == PACKS)


def a_save_that_has_lost_its_place_is_not_made_visible(
    rank: int, root: Path, backend: Backend
) -> None:
    """Staged files are removed, also the directory that a late write makes again."""
    request = save_async(weight(rank), root, backend)
    until(request.done)
    dist.barrier()
    if rank == 0 and backend == PACKS:
        next(root.glob("packs/*/*")).unlink()
    elif rank == 0:
        (staged,) = root.glob(".partial-*")
        shutil.rmtree(staged)
        (staged / "w").mkdir(parents=True)
    dist.barrier()
    said = "has another size"
    require_refused(request.wait, StorageError, said, str(root))
    dist.barrier()
    assert [path for path in root.rglob("*") if path.is_file() and path.stat().st_size] == []


def a_save_may_be_waited_for_again_after_a_wait_that_failed_on_all_ranks(
    rank: int, root: Path, backend: Backend
) -> None:
    """A wait that is too short on all ranks, and saves that ranks end in another order."""
    if rank == 1:
        writer().suspend()
    slow = save_async(weight(rank), root / "slow", backend)
    late = partial(slow.wait, 0.1)
    require_refused(late, StorageTimeoutError, "the save is not done after 0.1 s")
    writer().resume()
    slow.wait()
    handles = [save_async(weight(rank), root / name, backend) for name in "ab"]
    odd = handles[rank == 1].wait
    require_refused(odd, PlanError, "to end their saves in the same order")
    for handle in handles:
        handle.wait()
    assert all(is_saved(rank, root / name) for name in ("slow", "a", "b"))


def signals_to_all_processes_of_the_job_end_no_writer(
    rank: int, root: Path, backend: Backend
) -> None:
    """As of a terminal, or of SLURM."""
    before = writer()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        before.send_signal(number)
    save_async(weight(rank), root, backend).wait()
    assert writer() == before
    assert is_saved(rank, root)


CHECKS: tuple[Callable[[int, Path, Backend], None], ...] = (
    a_save_waits_until_the_one_before_has_written_its_share,
    tensors_may_be_overwritten_as_soon_as_the_call_returns,
    a_failure_reaches_every_rank_and_publishes_nothing,
    a_changed_structure_is_never_saved_by_an_old_plan,
    a_save_that_another_one_has_overtaken_is_not_made_visible,
    a_save_that_has_lost_its_place_is_not_made_visible,
    a_save_may_be_waited_for_again_after_a_wait_that_failed_on_all_ranks,
    signals_to_all_processes_of_the_job_end_no_writer,
)


def run_checks(rank: int, scratch: Path, backend: Backend) -> None:
    """All of them with the same writing processes, which take seconds to start."""
    save_async(weight(rank), scratch / "good", backend).wait()
    for check in CHECKS:
        check(rank, scratch / check.__name__, backend)


@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_a_save_in_the_background_is_as_one_in_the_foreground(
    backend: Backend, tmp_path: Path
) -> None:
    require_on_ranks(4, run_checks, tmp_path, backend)


def test_a_niced_job_saves_in_the_background(tmp_path: Path) -> None:
    require_on_ranks(2, a_niced_job_saves_though_it_cannot_raise_its_priority, tmp_path)


def die_beside_a_writer(rank: int, root: Path) -> None:
    """Both saves have the same writer, also where nothing is registered."""
    save_async(weight(rank), root / "good").wait()
    save_async(weight(rank, 3_000_000), root / "bad")
    (root / "pid").write_text(str(writer().pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_process_that_writes_ends_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    (died,) = run_processes(1, die_beside_a_writer, tmp_path)

    assert isinstance(died, RankDiedError)
    until(lambda: not is_running(int((tmp_path / "pid").read_text())))
    assert not (tmp_path / "bad" / "metadata.json").exists()
