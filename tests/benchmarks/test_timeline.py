from __future__ import annotations

import pytest

from benchmarks.measuring.spans import LANES, MAIN, NETWORK, STORAGE
from benchmarks.timeline import CALLS
from tests.support.scripts import Results, results_of

pytestmark = pytest.mark.multiprocess

SAVES = {name for name, call in CALLS.items() if not call.is_load}
LOADS = set(CALLS) - SAVES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("timeline.py", tmp_path_factory.mktemp("run"))


def kinds_of(results: Results, call: str, lane: str) -> set[str]:
    lines = [line for line in results.of_kind("timeline") if line["call"] == call]
    return {span["kind"] for line in lines for span in line["spans"] if span["lane"] == lane}


def test_every_call_is_recorded_on_every_rank(results: Results) -> None:
    found = [(line["call"], line["rank"]) for line in results.of_kind("timeline")]
    assert found == [(name, rank) for name in CALLS for rank in (0, 1)]


def test_spans_lie_within_the_call(results: Results) -> None:
    for line in results.of_kind("timeline"):
        for span in line["spans"]:
            assert span["lane"] in LANES
            assert -1e-9 <= span["begin"] <= span["end"] <= line["seconds"] + 1e-9


def test_the_main_thread_is_accounted_for_all_the_time(results: Results) -> None:
    for line in results.of_kind("timeline"):
        spans = [span for span in line["spans"] if span["lane"] == MAIN]
        covered = sum(span["end"] - span["begin"] for span in spans)
        # Ranks do not start and end at the same moment, and close spans are one.
        assert covered > 0.5 * line["seconds"]


@pytest.mark.parametrize("call", sorted(SAVES))
def test_a_save_waits_for_ranks_and_for_storage_that_writes_and_flushes(
    results: Results, call: str
) -> None:
    assert {"waiting for ranks", "waiting for storage"} <= kinds_of(results, call, MAIN)
    assert "writing" in kinds_of(results, call, STORAGE)
    assert kinds_of(results, call, NETWORK) <= {"exchanging"}


@pytest.mark.parametrize("call", sorted(LOADS))
def test_a_two_stage_load_reads_and_broadcasts(results: Results, call: str) -> None:
    assert {"waiting for ranks", "planning", "sending"} <= kinds_of(results, call, MAIN)
    assert kinds_of(results, call, STORAGE) == {"reading"}
    assert kinds_of(results, call, NETWORK) == {"broadcasting"}


def test_nothing_is_left_behind(results: Results) -> None:
    assert results.left == []
