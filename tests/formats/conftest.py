"""The engines that the contract suite runs over."""

from __future__ import annotations

import pytest

from dist_ckpt_strategies.config import Engine


@pytest.fixture(params=list(Engine), ids=lambda engine: f"by-{engine.value}")
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    found: Engine = request.param
    return found


@pytest.fixture(params=list(Engine), ids=lambda engine: f"written-by-{engine.value}")
def writer(request: pytest.FixtureRequest) -> Engine:
    """The engine that writes; with ``reader``, every pair."""
    found: Engine = request.param
    return found


@pytest.fixture(params=list(Engine), ids=lambda engine: f"read-by-{engine.value}")
def reader(request: pytest.FixtureRequest) -> Engine:
    """The engine that reads."""
    found: Engine = request.param
    return found
