from __future__ import annotations

import pytest

from benchmarks.contenders.roster import GROUP_ENTRIES, READ_SHARES, SEND_SHARES, TWO_STAGE_ZARR
from benchmarks.measuring.gpt_state import GptSize, build_shards
from tests.support.scripts import Results, results_of

pytestmark = pytest.mark.multiprocess

NUM_RANKS = 3
"""Shares of unequal size, and a rank that neither reads first nor last."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("run")
    return results_of("two_stage.py", directory, "--ranks", str(NUM_RANKS))


def test_every_contender_is_measured_or_said_to_be_missing(results: Results) -> None:
    for kind in ("sample", "summary"):
        named = {x["contender"] for x in results.of_kind(kind) + results.of_kind("skipped")}
        assert set(GROUP_ENTRIES) <= named


def test_each_rank_holds_the_whole_state(results: Results) -> None:
    cases = [sample["case"] for sample in results.of_kind("sample")]
    assert {case["num_arrays"] for case in cases} == {27}
    assert {(case["num_ranks"], case["num_replicas"]) for case in cases} == {(NUM_RANKS, NUM_RANKS)}
    whole = build_shards(GptSize(num_layers=2, hidden=32, vocabulary=64), 0, 1)
    assert {case["nbytes"] for case in cases} == {sum(shard.tensor.nbytes for shard in whole)}


def test_files_on_a_disk_are_loaded_cold(results: Results) -> None:
    for sample in results.of_kind("sample"):
        is_memory = sample["case"]["file_system"] == "tmpfs"
        assert sample["step"] == ("load warm" if is_memory else "load cold")


def test_the_floor_is_the_longer_of_read_and_exchange(results: Results) -> None:
    seconds = {x["contender"]: x["seconds"] for x in results.of_kind("summary")}
    floor = max(seconds[READ_SHARES], seconds[SEND_SHARES])
    ours = next(x for x in results.of_kind("summary") if x["contender"] == TWO_STAGE_ZARR)
    assert ours["floor_ratio"] == pytest.approx(ours["seconds"] / floor)


def test_nothing_is_left_behind(results: Results) -> None:
    assert results.left == []
