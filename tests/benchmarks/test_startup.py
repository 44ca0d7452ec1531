from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.startup import TARGETS_S, starts, summary_of
from tests.support.scripts import results_of

pytestmark = pytest.mark.multiprocess


def test_every_command_is_timed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    results = results_of("startup.py", tmp_path)
    names = {start.name for start in starts(tmp_path)}

    assert {line["name"] for line in results.of_kind("sample")} == names
    assert {line["name"] for line in results.of_kind("summary")} == names
    assert names > TARGETS_S.keys()
    assert all(line["seconds"] > 0 for line in results.of_kind("sample"))
    assert results.left == []


def test_a_summary_has_the_median_the_spread_and_what_is_wanted() -> None:
    found = summary_of("dist-ckpt --help", [3.0, 1.0, 2.0])

    assert (found.median, found.least, found.most, found.target) == (2.0, 1.0, 3.0, 0.5)
