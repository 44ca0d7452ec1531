from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contenders.roster import STORE_PACKAGES
from benchmarks.measuring.store_site import MOTO, RADOSGW, delete_below, open_store, why_not
from tests.support.scripts import Results, results_of

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(why_not(MOTO) is not None, reason=str(why_not(MOTO))),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("object_stores.py", tmp_path_factory.mktemp("run"), "--server", MOTO)


def test_everyone_saves_and_loads(results: Results) -> None:
    for kind in ("sample", "summary"):
        found = {(x["step"], x["contender"]) for x in results.of_kind(kind)}
        assert found == {(step, name) for step in ("save", "load") for name in STORE_PACKAGES}
        assert {x["case"]["file_system"] for x in results.of_kind(kind)} == {MOTO}


def test_nothing_is_left_behind(results: Results) -> None:
    assert results.left == []


def test_a_checkpoint_is_deleted_and_its_neighbour_stays(tmp_path: Path) -> None:
    with open_store(MOTO, tmp_path) as store:
        store.make_bucket("bucket")
        for name in ("a/1", "a/2", "ab/1"):
            store.put("bucket", name, b"x")
        delete_below(store.client(), "bucket", "a")
        assert store.names("bucket") == ["ab/1"]


def test_a_server_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "radosgw is not installed" in str(why_not(RADOSGW))
