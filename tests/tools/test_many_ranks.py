"""``convert``, ``diff`` and ``verify`` shared by several ranks: the result of one process."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize

from dist_ckpt_strategies import ConvertOptions, convert, diff
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.errors import PeerLostError, PlanError
from dist_ckpt_strategies.formats.scan import scan, verify
from tests.support.checkpoints import contents, copied, flip_at, write_array, write_checkpoint
from tests.support.ranks import RankDiedError, run_processes
from tests.support.thread_ranks import ThreadCommunicator, run_ranks
from tests.tools.all_formats import FORMATS

pytestmark = pytest.mark.slow

SMALL = ConvertOptions(max_memory_bytes=1, max_file_bytes=50_000, num_threads=2)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint in each format; not to be changed."""
    root = tmp_path_factory.mktemp("sources")
    source = write_checkpoint(root / "zarr@1")
    values = np.arange(300 * 200, dtype=np.float32).reshape(300, 200)
    for key in ("large", "optimizer.state.param.large"):
        write_array(source, values, key=key, chunk=(64, 90))
    for to in FORMATS[1:]:
        convert(source, root / to, to, options=SMALL)
    return root


@pytest.mark.parametrize(
    ("source", "to"),
    [
        *(("pack", to) for to in (*FORMATS, "safetensors")),
        *(("zarr@1", "pack"), ("zarr@3", "zarr@1"), ("torch_dist", "zarr@3")),
    ],
)
def test_ranks_write_the_same_bytes_as_one_process(
    sources: Path, tmp_path: Path, source: str, to: str
) -> None:
    one = convert(sources / source, tmp_path / "one", to, options=SMALL)
    assert one.num_arrays == (5 if to == "safetensors" else 6)  # without the optimizer's
    seen: list[tuple[int, int]] = []

    def body(comm: ThreadCommunicator) -> Any:
        watch = (lambda done, total: seen.append((done, total))) if comm.rank == 0 else None
        return convert(
            sources / source, tmp_path / "two", to, options=SMALL, watch=watch, comm=comm
        )

    reports = run_ranks(2, body)

    assert [report.nbytes for report in reports] == [one.nbytes] * 2, reports
    files = [contents(tmp_path / name) for name in ("one", "two")]
    if to == "pack":  # files have random names, headers a save id, and the index the time
        assert diff(tmp_path / "one", tmp_path / "two").is_equal
        files = [tensors_of(tmp_path / name) for name in ("one", "two")]
    assert files[0] == files[1] != {}
    assert seen[-1] == (one.nbytes, one.nbytes)


def tensors_of(root: Path) -> dict[str, bytes]:
    """Every tensor of every pack but the digests."""
    read: Any = deserialize
    packs = [read(path.read_bytes()) for path in root.glob("packs/*/*")]
    found = {name: bytes(tensor["data"]) for pack in packs for name, tensor in pack}
    for name in ("__digests__", "__padding__"):
        found.pop(name, None)
    assert len(packs) > 5
    return found


def test_all_ranks_return_what_one_process_finds(sources: Path, tmp_path: Path) -> None:
    one, other = sources / "zarr@1", copied(sources / "zarr@1", tmp_path / "other")
    write_array(other, np.ones((300, 200), np.float32), key="large", chunk=(64, 90))
    report = diff(one, other)
    assert [found.num_differing for found in report.arrays] == [300 * 200 - 1]
    assert run_ranks(2, lambda comm: diff(one, other, comm=comm)) == [report] * 2

    for path in other.rglob("shard_*"):
        flip_at(path, 70)
    issues = verify(scan(other))
    assert len(issues) > 2
    assert run_ranks(2, lambda comm: verify(scan(other), comm=comm)) == [issues] * 2


def test_ranks_that_see_different_checkpoints_are_refused(sources: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")

    def body(comm: ThreadCommunicator) -> None:
        source = other if comm.rank else sources / "zarr@1"
        with pytest.raises(PlanError, match="see different checkpoints"):
            convert(source, tmp_path / "t", "pack", comm=comm)

    run_ranks(2, body)


def convert_or_die(rank: int, source: Path, target: Path) -> None:
    def die(_done: int, _total: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    comm = open_communicator(None, timeout_s=60, purpose="test")
    convert(source, target, "torch_dist", watch=die if rank else None, comm=comm)


@pytest.mark.multiprocess
def test_a_rank_that_dies_is_named_and_nothing_is_visible(sources: Path, tmp_path: Path) -> None:
    lost, died = run_processes(2, convert_or_die, sources / "zarr@1", tmp_path / "t")

    assert isinstance(died, RankDiedError)
    assert isinstance(lost, PeerLostError), lost
    assert lost.rank == 1
    assert not (tmp_path / "t" / "metadata.json").exists()
