"""A twentieth of the campaign: training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import results_of


@pytest.mark.multiprocess
@pytest.mark.timeout(400)
def test_a_twentieth_of_the_campaign_finds_no_violation(tmp_path: Path) -> None:
    found = results_of("recovery_faults.py", tmp_path, "--seed", "4", limit_s=380)

    assert len(found.of_kind("recovery")) == 25
    assert [line["faults"] for line in found.of_kind("campaign")] == [25]
    assert (found.of_kind("violation"), found.left) == ([], [])
