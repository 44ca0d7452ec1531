"""The engines that the contract suite runs over."""

from __future__ import annotations

import pytest

from dist_ckpt_strategies.config import Engine


@pytest.fixture(params=list(Engine), ids=lambda engine: f"read-by-{engine.value}")
def reader(request: pytest.FixtureRequest) -> Engine:
    """The engine that reads."""
    found: Engine = request.param
    return found
