from __future__ import annotations

import pytest

from benchmarks.measuring.equal_arrays import Extent, build_equal_shards
from benchmarks.scaling import SWEEPS
from tests.support.scripts import Results, results_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("scaling.py", tmp_path_factory.mktemp("run"))


def test_every_contender_is_measured_or_said_to_be_missing(results: Results) -> None:
    named = {x["contender"] for x in results.of_kind("sample") + results.of_kind("skipped")}
    assert named == {"raw write+fsync", "raw write", "zarr 1", "zarr 2", "torch_dist"}


def test_every_sample_says_what_grows_and_how_much_there_is(results: Results) -> None:
    cases = [line["case"] for line in results.of_kind("sample")]
    found = {(case["sweep"], case["num_arrays"], case["num_ranks"]) for case in cases}
    assert found == {("bytes", 6, 2), ("ranks", 6, 1)}
    assert all(line["seconds"] > 0 for line in results.of_kind("summary"))


def test_nothing_is_left_behind(results: Results) -> None:
    assert results.left == []


@pytest.mark.parametrize("sweep", SWEEPS)
def test_one_thing_grows_and_the_others_stay(sweep: str) -> None:
    extents = SWEEPS[sweep]
    by_field = list(
        zip(*((one.nbytes, one.num_arrays, one.num_ranks) for one in extents), strict=True)
    )
    assert [len(set(values)) == 1 for values in by_field].count(False) == 1
    assert all(list(values) == sorted(values) for values in by_field)


@pytest.mark.parametrize("extent", [Extent(2_000_000, 10, 2), Extent(8_000_000, 100, 4)])
def test_all_ranks_together_hold_about_the_bytes(extent: Extent) -> None:
    parts = [build_equal_shards(extent, part) for part in range(extent.num_ranks)]
    nbytes = sum(shard.tensor.nbytes for own in parts for shard in own)
    assert nbytes == pytest.approx(extent.nbytes, rel=0.06)
    assert all(len(own) == extent.num_arrays for own in parts)
