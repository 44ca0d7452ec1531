"""A checkpoint of format 1 for the commands to look at."""

from pathlib import Path

import pytest

from tests.support.checkpoints import copied, write_checkpoint


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint, not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("whole") / "ckpt")


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A whole checkpoint, to be damaged."""
    return copied(written, tmp_path / "ckpt")
