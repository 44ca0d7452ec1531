"""Settings of the suite."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.processes import PYTHONPATH
from tests.support.quick_start import sitecustomize  # noqa: F401 - before Megatron-Core

os.environ["PYTHONPATH"] = PYTHONPATH

# Else each process compiles the package, and each worker rewrites the asserts of all tests, anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

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


_LONG = (
    *("benchmarks/test_scripts.py", "cluster/", "faults/test_campaign.py", "interop/"),
    *("packaging/", "seams/", "stores/"),
    *("comm/test_interruptible_gloo.py", "inprocess/test_elastic_agent.py"),
    *("inprocess/test_nodes.py", "inprocess/test_scripts.py", "cli/test_ranks.py"),
    *("cli/test_bench.py", "recovery/test_megatron_layouts.py", "strategies/test_queues.py"),
    *("integrations/test_lightning_page.py", "test_recovery_page.py"),
)
"""Campaigns, servers, the wheel, older releases, and jobs whose processes import all themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``tox -e py`` leaves to CI; a server is another process."""
    start = len(str(Path(__file__).parent)) + 1
    for item in items:
        name = str(item.path)[start:]
        if name.startswith(_LONG):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
        if name.startswith("stores/"):
            item.add_marker(pytest.mark.multiprocess)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch  # noqa: PLC0415 - the process that hands out the tests does without

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
