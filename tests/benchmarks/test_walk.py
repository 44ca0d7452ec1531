"""How often ranks meet in collectives in a save and a load of regular shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.walk import AIMS, STRATEGIES
from tests.support.scripts import results_of

pytestmark = pytest.mark.multiprocess


def test_a_second_save_and_load_take_no_more_collectives_than_promised(tmp_path: Path) -> None:
    lines = results_of("walk.py", tmp_path).of_kind("walk")

    assert len(lines) == len(STRATEGIES) * len(AIMS)
    for line in lines:
        assert line["functions"]
        assert line["files"]
        assert 0 < sum(line["collectives"].values()) <= AIMS[line["call"]][2], line["strategy"]
