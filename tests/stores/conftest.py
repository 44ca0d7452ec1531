"""The servers that the tests of object stores run over, and a bucket for each test."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

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
    if request.param == "moto":
        found: ObjectStore = request.getfixturevalue("moto_store")
        return found
    server: Radosgw = request.getfixturevalue("radosgw")
    return server.store


@pytest.fixture
def bucket(request: pytest.FixtureRequest, store: ObjectStore) -> str:
    """A new bucket for one test."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[-60:].strip("-")
    store.make_bucket(name)
    return name


@pytest.fixture
def environment(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server, for this process too."""
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)
    return store
