"""The carriers that the contract suite runs over."""

from __future__ import annotations

import pytest

from tests.comm.communicators import (
    Carrier,
    over_gloo,
    over_solo,
    over_threads,
)


@pytest.fixture(
    params=[
        over_solo,
        over_threads,
        pytest.param(over_gloo, marks=pytest.mark.multiprocess),
    ],
    ids=lambda carrier: carrier.__name__,
)
def carrier(request: pytest.FixtureRequest) -> Carrier:
    """One rank, four threads, four processes."""
    found: Carrier = request.param
    return found


@pytest.fixture(
    params=[
        over_threads,
        pytest.param(over_gloo, marks=pytest.mark.multiprocess),
    ],
    ids=lambda carrier: carrier.__name__,
)
def four_ranks(request: pytest.FixtureRequest) -> Carrier:
    """Four threads, four processes."""
    found: Carrier = request.param
    return found
