"""A small part of the campaigns of ``python -m tests.faults``."""

from pathlib import Path

import pytest

from tests.faults.files import Kind
from tests.faults.operations import OPERATIONS
from tests.faults.oracle import Place
from tests.faults.run import Campaign, run_campaign

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "campaign",
    [Campaign(1, 8, 0, 0), Campaign(3, 1, 68, 0), Campaign(4, 0, 0, 40)],
    ids=str,
)
def test_the_oracle_finds_nothing_wrong(campaign: Campaign, tmp_path: Path) -> None:
    tally = run_campaign(campaign, tmp_path)

    assert tally.events.total() == campaign.num_events
    assert len(tally.attempts) == (len(OPERATIONS) if campaign.num_attempts else 0)
    assert tally.changes.total() == 2 * campaign.num_changes
    hit = {one.rpartition(" of ")[2] for one in tally.changes}
    assert hit == ({*Kind, *Place} if campaign.num_changes else set())
