from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contenders.roster import READ_SHARES, RESHARD_PACKAGES
from tests.support.scripts import Results, results_of, run_script

pytestmark = pytest.mark.multiprocess

MOVE = "2 rows to 2 columns"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("reshard.py", tmp_path_factory.mktemp("run"), "--move", MOVE)


def test_every_contender_is_measured_or_said_to_be_missing(results: Results) -> None:
    for kind in ("sample", "summary"):
        lines = results.of_kind(kind)
        named = {x["contender"] for x in lines + results.of_kind("skipped")}
        assert named == set(RESHARD_PACKAGES)
        assert {(x["case"]["move"], x["case"]["num_ranks"]) for x in lines} == {(MOVE, 2)}


def test_the_floor_reads_what_is_needed_and_who_changes_the_layout_more(results: Results) -> None:
    for sample in results.of_kind("sample"):
        read = sample["values"]["read_by_calls"]
        if sample["contender"] == READ_SHARES:
            assert 1 <= read < 1.1
        else:
            assert read > 1.1  # these are toy sizes: metadata is most of it


def test_nothing_is_left_behind(results: Results) -> None:
    assert results.left == []


def test_an_unknown_move_is_refused_by_name(tmp_path: Path) -> None:
    done = run_script("reshard.py", tmp_path, "--move", "sideways")
    assert done.returncode == 2
    assert "'sideways'" in done.stderr
