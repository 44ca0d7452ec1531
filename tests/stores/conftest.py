"""The servers that the tests of object stores run over, and a bucket for each test."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.commands import Files, write
from tests.support.faulty_proxy import FaultyProxy
from tests.support.folders import Folder, folder_in_bucket, folder_on_disk
from tests.support.object_stores import ObjectStore, Radosgw, moto, why_no_radosgw


@pytest.fixture(scope="session")
def moto_store() -> Iterator[ObjectStore]:
    """One moto server for the whole session."""
    with moto() as store:
        yield store


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Radosgw]:
    """One radosgw for the whole session; skips where it is not installed."""
    why_not = why_no_radosgw()
    if why_not is not None:
        pytest.skip(why_not)
    server = Radosgw(tmp_path_factory.mktemp("radosgw"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["moto", "radosgw"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """Each server in turn."""
    return _store(request)


@pytest.fixture
def bucket(request: pytest.FixtureRequest, store: ObjectStore) -> str:
    """A new bucket for one test."""
    return _new_bucket(store, request.node.name)


@pytest.fixture
def environment(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server, for this process too."""
    return _used(store, monkeypatch)


@pytest.fixture
def in_bucket(environment: ObjectStore, bucket: str) -> Folder:
    """Where a run has its checkpoints, on each server in turn."""
    return folder_in_bucket(environment, bucket)


@pytest.fixture
def proxy(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, for this process too."""
    with FaultyProxy(store) as found:
        _used(found.store, monkeypatch)
        yield found


@pytest.fixture(params=["directory", "moto", "radosgw"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Folder:
    """Where a run has its checkpoints, in a directory and on each server in turn."""
    if request.param == "directory":
        return folder_on_disk(tmp_path / "run")
    store = _used(_store(request), monkeypatch)
    return folder_in_bucket(store, _new_bucket(store, request.node.name))


@pytest.fixture
def files(place: Folder) -> Files:
    """The files of a whole checkpoint, to be damaged, in each kind of place in turn."""
    top = place / "iter_0000003"
    write(top.address)
    return Files(top)


def _store(request: pytest.FixtureRequest) -> ObjectStore:
    if request.param == "moto":
        found: ObjectStore = request.getfixturevalue("moto_store")
        return found
    server: Radosgw = request.getfixturevalue("radosgw")
    return server.store


def _new_bucket(store: ObjectStore, test: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", test.lower()).strip("-")[-60:].strip("-")
    store.make_bucket(name)
    return name


def _used(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)
    return store
