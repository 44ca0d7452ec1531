"""What fails on one rank alone, between two meetings or within a step, is raised on all four.

A seeded share of what ``python -m tests.faults`` tries: every call of a function that gets memory,
files or threads.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.scenarios import SCENARIOS
from tests.faults.sweep import Fault, try_selection
from tests.support.ranks import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

_KINDS = ("np.empty", "np.frombuffer", "torch.empty", "os.open", "os.preadv", "Thread.start")
_NUM_OTHERS = 2
_MAX_CALL = 9


def chosen(scenario: str) -> list[Fault]:
    """The first call of each function, and some later ones."""
    generator = random.Random(scenario)
    faults = [Fault(kind, 1) for kind in _KINDS]
    for _ in range(_NUM_OTHERS):
        kind, number = generator.choice(_KINDS), generator.randint(2, _MAX_CALL)
        faults.append(Fault(kind, number, for_ever=generator.random() < 0.5))
    return faults


SHARES = (
    ("save zarr 1", "load zarr 1", "save zarr 2", "load zarr 2"),
    ("save behind zarr 1", "save behind zarr 2", "two stages zarr 1", "two stages zarr 2"),
    ("save local_replicated", "load local_replicated", "reshard"),
    ("save parts", "save parts behind", "load parts", "exchange states"),
    ("recover from", "recover"),
)


def test_every_scenario_is_in_a_share() -> None:
    assert {name for share in SHARES for name in share} == SCENARIOS.keys()


@pytest.mark.parametrize("share", SHARES, ids=lambda share: share[0])
def test_a_failure_on_one_rank_reaches_all_and_the_group_goes_on(
    share: tuple[str, ...], tmp_path: Path
) -> None:
    selection = [(scenario, chosen(scenario)) for scenario in share]

    results = run_processes(4, try_selection, str(tmp_path), selection, timeout_s=150)

    for result in results:
        assert isinstance(result, dict), (result, getattr(result, "__notes__", ""))
        assert result == {scenario: [] for scenario in share}
