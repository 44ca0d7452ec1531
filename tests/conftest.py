"""Settings of the suite."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# torch looks up the name of every peer that a store's client connects to. Where no name server
# answers, that takes 5 s; /etc/hosts is still read.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# Two shared cores: time says nothing about an example, and a minute is a lot.
settings.register_profile(
    "suite",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
