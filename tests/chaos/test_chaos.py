"""Training goes on from the right state whatever strikes it; see ``python -m tests.chaos``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.run import Campaign, report, run_campaign

NUM_EVENTS = 40


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_after_every_event_the_right_state_is_recovered(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = Campaign(seed, NUM_EVENTS)

    tally = run_campaign(campaign, tmp_path)

    assert tally.events.total() == NUM_EVENTS
    (tmp_path / "report.json").write_text(report(campaign, tally))
    with capsys.disabled():
        sys.stdout.write(f"\n{report(campaign, tally)}\n")
