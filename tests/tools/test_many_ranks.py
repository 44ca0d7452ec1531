"""``convert`` shared by several ranks: the result of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_ckpt_strategies import ConvertOptions, convert
from dist_ckpt_strategies.errors import PlanError
from tests.support.checkpoints import write_array, write_checkpoint
from tests.support.thread_ranks import ThreadCommunicator, run_ranks
from tests.tools.all_formats import FORMATS

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

    reports = run_ranks(2, body, timeout_s=60.0)

    assert [report.nbytes for report in reports] == [one.nbytes] * 2, reports
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert seen[-1] == (one.nbytes, one.nbytes)


def test_ranks_that_see_different_checkpoints_are_refused(sources: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")

    def body(comm: ThreadCommunicator) -> None:
        source = other if comm.rank else sources / "zarr@1"
        with pytest.raises(PlanError, match="see different checkpoints"):
            convert(source, tmp_path / "t", "zarr@2", comm=comm)

    run_ranks(2, body, timeout_s=60.0)
