"""A twentieth of the campaign: training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recovery_faults import FAULTS_PER_JOB, Campaign
from tests.support.scripts import results_of


@pytest.mark.multiprocess
@pytest.mark.timeout(400)
def test_a_twentieth_of_the_campaign_finds_no_violation(tmp_path: Path) -> None:
    found = results_of("recovery_faults.py", tmp_path, "--seed", "4", limit_s=380)

    assert len(found.of_kind("recovery")) == 25
    assert [line["faults"] for line in found.of_kind("campaign")] == [25]
    assert (found.of_kind("violation"), found.left) == ([], [])


def test_every_fault_is_in_one_job_and_jobs_differ() -> None:
    jobs = list(Campaign(3, 2 * FAULTS_PER_JOB + 1, 60.0).jobs())

    assert [len(faults) for _, faults in jobs] == [FAULTS_PER_JOB, FAULTS_PER_JOB, 1]
    assert jobs[0][1] != jobs[1][1]
