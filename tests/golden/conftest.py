"""Fixtures: the sets unpacked once, and registries that are as before after each test."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.golden.sets import FLAT, NAMES, GoldenSet, register
from tests.support.registries import fresh_registries


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GoldenSet]:
    """Gives the set of a name; each is unpacked once, and not to be changed."""
    root = tmp_path_factory.mktemp("golden")
    return cache(lambda name: GoldenSet.unpack(name, root))


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest, unpacked: Callable[[str], GoldenSet]) -> GoldenSet:
    return unpacked(request.param)


@pytest.fixture
def flat(unpacked: Callable[[str], GoldenSet]) -> GoldenSet:
    return unpacked(FLAT)


@pytest.fixture
def registered() -> Iterator[None]:
    """The strategies registered; on leaving, the registries are as they were."""
    with fresh_registries():
        register()
        yield
