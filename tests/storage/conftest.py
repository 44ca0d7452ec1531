"""The engines that the contract suite runs over, and small disks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_ckpt_strategies.config import Engine
from tests.support.disks import tiny_ext4, tiny_tmpfs


@pytest.fixture(params=list(Engine), ids=lambda engine: f"by-{engine.value}")
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    found: Engine = request.param
    return found


@pytest.fixture(params=list(Engine), ids=lambda engine: f"written-by-{engine.value}")
def writer(request: pytest.FixtureRequest) -> Engine:
    """The engine that writes; with ``reader``, every pair."""
    found: Engine = request.param
    return found


@pytest.fixture(params=list(Engine), ids=lambda engine: f"read-by-{engine.value}")
def reader(request: pytest.FixtureRequest) -> Engine:
    """The engine that reads."""
    found: Engine = request.param
    return found


@pytest.fixture(params=[tiny_tmpfs, tiny_ext4], ids=["on-tmpfs", "on-ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty file system of its own: of 256 KiB in memory, of 4 MiB on a disk."""
    with request.param(tmp_path / "small_disk") as directory:
        yield directory
