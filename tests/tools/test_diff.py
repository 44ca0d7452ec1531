"""A comparison of nothing is no proof that two checkpoints are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt_strategies import diff
from dist_ckpt_strategies.errors import ArrayNotFoundError
from tests.support.format2_checkpoints import LARGE, write_format2


def test_a_pattern_that_no_key_matches_is_an_error(tmp_path: Path) -> None:
    root = write_format2(tmp_path / "c")
    assert diff(root, root, keys=LARGE[:3] + "*").num_arrays == 1
    with pytest.raises(ArrayNotFoundError, match=r"no array's key matches 'decodr\.\*'"):
        diff(root, root, keys="decodr.*")
