from __future__ import annotations

import pytest

from benchmarks.contenders.roster import LOCAL_FLOOR, LOCAL_MANAGER, LOCAL_PACKAGES
from benchmarks.local_replicated import STEPS
from tests.support.scripts import Results, results_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("local_replicated.py", tmp_path_factory.mktemp("run"))


def test_every_contender_is_measured_or_said_to_be_missing(results: Results) -> None:
    for kind in ("sample", "summary"):
        named = {x["contender"] for x in results.of_kind(kind) + results.of_kind("skipped")}
        assert set(LOCAL_PACKAGES) <= named


def test_every_step_of_ours_is_compared_with_its_floor(results: Results) -> None:
    seconds = {(x["step"], x["contender"]): x["seconds"] for x in results.of_kind("summary")}
    for step in STEPS:
        ours = next(
            x
            for x in results.of_kind("summary")
            if (x["step"], x["contender"]) == (step, LOCAL_MANAGER)
        )
        assert ours["floor_ratio"] == pytest.approx(
            seconds[step, LOCAL_MANAGER] / seconds[step, LOCAL_FLOOR]
        )


def test_nothing_is_left_behind(results: Results) -> None:
    assert results.left == []
