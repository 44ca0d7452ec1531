"""The agents of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inprocess.agents import Agents


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(tmp_path)
    yield found
    for agent in found.started:
        with agent:  # closes its pipes
            agent.kill()
    found.require_ended()
