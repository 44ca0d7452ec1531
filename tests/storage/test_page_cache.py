"""What the page cache is said to hold, and what is announced to it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.storage import file_systems as page_cache
from dist_ckpt_strategies.storage.file_systems import begin_readahead, file_access, is_cached
from tests.support.disks import tiny_ext4, tiny_tmpfs

SIZE = 3 << 20
WAIT_S = 30.0


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Four files that are flushed, and that the page cache has been told to forget."""
    if not file_access(tmp_path, Options()).is_direct:
        pytest.skip("needs ext4 or xfs: other file systems may not forget")
    found = [tmp_path / str(number) for number in range(4)]
    for path in found:
        with path.open("wb") as file:
            file.write(bytes(SIZE))
            file.flush()
            os.fsync(file.fileno())
        forget(str(path))
    return list(map(str, found))


def forget(path: str) -> None:
    """Have the page cache let go of a file; pages that are just being looked at stay at first."""
    with Path(path).open("rb") as file:
        deadline = time.monotonic() + WAIT_S
        while True:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not is_cached(file.fileno(), SIZE):
                return
            assert time.monotonic() < deadline, f"{path} stays in the page cache"
            time.sleep(0.01)


@pytest.fixture(params=["cachestat", "preadv2"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the kernel is asked."""
    if request.param == "preadv2":
        monkeypatch.setattr(page_cache, "_c_library", lambda: None)
    return str(request.param)


def cached(path: str) -> bool:
    with Path(path).open("rb") as file:
        return is_cached(file.fileno(), os.fstat(file.fileno()).st_size)


def test_a_file_that_is_not_cached_is_known_to_be(paths: list[str], way: str) -> None:
    """Asked by preadv2, the kernel reads the page: a disk that is quick has it there at once."""
    assert not all(map(cached, paths)), way
    Path(paths[0]).read_bytes()
    assert cached(paths[0]), way


def test_announced_files_come_without_being_read(paths: list[str]) -> None:
    begin_readahead(paths)
    deadline = time.monotonic() + WAIT_S
    while not all(map(cached, paths)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(cached, paths))


def test_files_go_past_the_page_cache_of_a_local_disk_alone(tmp_path: Path) -> None:
    with tiny_ext4(tmp_path / "ext4") as directory:
        assert file_access(directory, Options()).is_direct
        assert file_access(directory / "not" / "yet" / "there", Options()).is_direct
        assert not file_access(directory, Options(direct_io=False)).is_direct
    with tiny_tmpfs(tmp_path / "tmpfs") as directory:
        assert not file_access(directory, Options()).is_direct


def test_a_file_in_memory_counts_as_cached(tmp_path: Path, way: str) -> None:
    with tiny_tmpfs(tmp_path / "tmpfs") as directory:
        (directory / "file").write_bytes(bytes(1 << 16))
        assert cached(str(directory / "file")), way


def test_processes_that_read_the_same_directory_share_a_page_cache(tmp_path: Path) -> None:
    found = page_cache.page_cache_of(tmp_path)
    if found is None:
        pytest.skip("needs a temporary directory on a local file system")
    (tmp_path / "other").mkdir()

    assert page_cache.page_cache_of(tmp_path / "other" / "..") == found
    assert page_cache.page_cache_of(tmp_path / "other") != found


@pytest.mark.parametrize("path", ["/proc", "/no such directory"])
def test_where_no_page_cache_is_known_there_is_none_to_share(path: str) -> None:
    assert page_cache.page_cache_of(Path(path)) is None


def test_a_file_system_in_memory_is_its_own_page_cache(tmp_path: Path) -> None:
    with tiny_tmpfs(tmp_path / "tiny") as directory:
        found = page_cache.page_cache_of(directory)

    assert found is not None
    assert found.is_storage


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux's /proc")
def test_the_limit_of_a_control_group_bounds_the_memory_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "_CONTROL_GROUP", tmp_path)
    whole = page_cache.available_nbytes()
    (tmp_path / "memory.max").write_text("max\n")
    without = page_cache.available_nbytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 500\n")

    assert min(whole, without) > 1000
    assert page_cache.available_nbytes() == 700
