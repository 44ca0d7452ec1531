"""``convert``, ``diff`` and ``verify`` shared by several ranks: the result of one process."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_ckpt_strategies import ConvertOptions, convert, diff
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PeerError,
    PeerLostError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.formats.locations import is_finished
from dist_ckpt_strategies.formats.scan import scan, verify
from tests.support.checkpoints import (
    copied,
    flip_at,
    write_array,
    write_checkpoint,
    write_object,
)
from tests.support.ranks import RankDiedError, run_processes
from tests.support.thread_ranks import ThreadCommunicator, run_ranks
from tests.tools.all_formats import FORMATS

SMALL = ConvertOptions(max_memory_bytes=1, max_file_bytes=50_000, num_threads=2)
SHAPE, CHUNK = (300, 200), (64, 90)


def write_source(root: Path, *, start: int = 0) -> Path:
    write_checkpoint(root)
    values = np.arange(start, start + 300 * 200, dtype=np.float32).reshape(SHAPE)
    for key in ("large", "optimizer.state.param.large"):
        write_array(root, values, key=key, chunk=CHUNK)
    return root


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint in each format; not to be changed."""
    root = tmp_path_factory.mktemp("sources")
    write_source(root / "zarr@1")
    for to in FORMATS[1:]:
        convert(root / "zarr@1", root / to, to, options=SMALL)
    return root


def on_ranks(size: int, body: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """What each rank returns, or the error that it raises."""

    def caught(comm: ThreadCommunicator) -> Any:
        try:
            return body(comm)
        except CheckpointError as error:
            return error

    return run_ranks(size, caught, timeout_s=60.0)


def contents(root: Path) -> dict[str, bytes]:
    """All files but the one that says when the save began."""
    paths = (path for path in root.rglob("*") if path.is_file())
    files = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    return {name: content for name, content in files.items() if name != "manifest/save.json"}


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("to", [*FORMATS, "safetensors"])
def test_ranks_write_the_same_bytes_as_one_process(
    sources: Path, tmp_path: Path, source: str, to: str
) -> None:
    one = convert(sources / source, tmp_path / "one", to, options=SMALL)
    seen: list[tuple[int, int]] = []

    def body(comm: ThreadCommunicator) -> Any:
        watch = (lambda done, total: seen.append((done, total))) if comm.rank == 0 else None
        return convert(
            sources / source, tmp_path / "two", to, options=SMALL, watch=watch, comm=comm
        )

    reports = on_ranks(2, body)

    assert [report.nbytes for report in reports] == [one.nbytes] * 2, reports
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert seen[-1] == (one.nbytes, one.nbytes)


def test_ranks_find_the_differences_that_one_process_finds(sources: Path, tmp_path: Path) -> None:
    other = write_source(tmp_path / "other", start=1)
    write_object(other / "o.new" / "shard_0_1.pt", [1])
    expected = diff(sources / "zarr@2", other, options=SMALL)
    assert [one.key for one in expected.arrays] == ["large", "optimizer.state.param.large"]
    assert [one.num_differing for one in expected.arrays] == [300 * 200] * 2

    reports = on_ranks(3, lambda comm: diff(sources / "zarr@2", other, options=SMALL, comm=comm))

    assert reports == [expected] * 3


@pytest.mark.parametrize("source", ["zarr@1", "zarr@2"])
def test_ranks_find_the_damage_that_one_process_finds(
    sources: Path, tmp_path: Path, source: str
) -> None:
    root = copied(sources / source, tmp_path / "c")
    damaged = [*sorted(root.glob("arrays/*/c*"))[:5], *sorted(root.rglob("shard_*"))[:2]]
    for path in [*damaged, root / "common.pt"]:
        flip_at(path, min(70, path.stat().st_size - 1))
    expected = verify(scan(root))
    assert len(expected) == len(damaged) + 1

    results = on_ranks(2, lambda comm: verify(scan(root), comm=comm))

    assert results == [expected] * 2


def test_damage_that_one_rank_finds_ends_the_conversion_on_all(
    sources: Path, tmp_path: Path
) -> None:
    root = copied(sources / "zarr@2", tmp_path / "c")
    (path,) = root.glob("arrays/large/c.1.1")
    flip_at(path, 70)

    errors = on_ranks(3, lambda comm: convert(root, tmp_path / "t", "zarr@1", comm=comm))

    assert all(isinstance(error, CorruptCheckpointError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    (failed,) = (n for n, error in enumerate(errors) if not isinstance(error, PeerError))
    assert str(errors[0]).startswith(f"rank {failed}: large: ")
    assert {(error.key, error.path) for error in errors} == {("large", str(path))}
    assert not is_finished(tmp_path / "t")
    convert(sources / "zarr@2", tmp_path / "t", "zarr@1")


def test_ranks_that_see_different_checkpoints_are_refused(sources: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")

    def body(comm: ThreadCommunicator) -> Any:
        source = other if comm.rank else sources / "zarr@1"
        return convert(source, tmp_path / "t", "zarr@2", comm=comm)

    errors = on_ranks(2, body)

    assert all(isinstance(error, PlanError) for error in errors), errors
    assert "see different checkpoints" in str(errors[0])


def convert_and_fail(rank: int, source: Path, target: Path, *, dies: bool) -> None:
    """Rank 1 is killed once it has written something, or may not write files of any size."""

    def die(_done: int, _total: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and not dies:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    comm = open_communicator(None, timeout_s=60, purpose="test")
    convert(source, target, "zarr@2", watch=die if rank == 1 and dies else None, comm=comm)


@pytest.mark.multiprocess
@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_dies_or_cannot_write_is_named_and_nothing_is_visible(
    sources: Path, tmp_path: Path, dies: bool
) -> None:
    body = partial(convert_and_fail, dies=dies)
    results = run_processes(2, body, sources / "zarr@1", tmp_path / "t")

    if dies:
        assert isinstance(results[0], PeerLostError), results
        assert isinstance(results[1], RankDiedError)
        assert results[0].rank == 1
    else:
        assert all(isinstance(error, StorageError) for error in results), results
        assert {str(error).partition(":")[0] for error in results} == {"rank 1"}
        assert str(tmp_path / "t") in str(results[0])
    assert not is_finished(tmp_path / "t")
