"""A twentieth of the campaign: training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery_faults import (
    FAULTS_PER_JOB,
    Campaign,
    Outcome,
    differences,
    recovery_seconds,
)
from benchmarks.recovery_training import InjectedFault, Kind, Point
from tests.support.scripts import results_of

WHOLE = Outcome(
    exit_code=0,
    output=(),
    events=tuple({"event": "loss", "at": 0.0, "rank": r, "step": 0, "loss": "0x1"} for r in (0, 1)),
    found_gone=(),
    digests={0: {"weights": "a"}, 1: {"weights": "b"}},
)


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"exit_code": None}, "the job hung"),
        ({"exit_code": 1}, "the job ended with 1"),
        ({"digests": {0: {"weights": "a"}}}, "rank 1: weights differs at the end"),
        ({"digests": {0: {"weights": "a"}, 1: {"weights": "c"}}}, "rank 1: weights differs"),
        ({"events": WHOLE.events[:1]}, "rank 1: no loss of step 0"),
        ({"events": (*WHOLE.events, {**WHOLE.events[0], "loss": "0x2"})}, "rank 0: the loss of"),
    ],
    ids=["hung", "failed", "missing rank", "other weights", "missing loss", "another loss"],
)
def test_every_difference_from_the_reference_run_is_reported(
    changes: Mapping[str, Any], expected: str
) -> None:
    assert not differences(WHOLE, WHOLE)
    assert any(expected in text for text in differences(replace(WHOLE, **changes), WHOLE))


def test_a_recovery_lasts_until_the_last_rank_is_in_a_step_of_a_later_epoch() -> None:
    lines = [
        {"event": "fault", "at": 1.0, "rank": 2, "number": 0, "epoch": 1},
        {"event": "step", "at": 1.1, "rank": 0, "epoch": 1},
        *({"event": "step", "at": 2.0 + rank, "rank": rank, "epoch": 2} for rank in range(4)),
        {"event": "step", "at": 9.0, "rank": 0, "epoch": 2},
    ]
    fault = InjectedFault(0, 0, Point.FORWARD, Kind.KILL, 2)
    outcome = replace(WHOLE, events=tuple(lines), found_gone=(1.5,))

    assert recovery_seconds(outcome, [fault]) == {0: 4.0}
    assert recovery_seconds(outcome, [replace(fault, kind=Kind.STOP)]) == {0: 3.5}
    assert recovery_seconds(replace(outcome, events=tuple(lines[:5])), [fault]) == {0: None}
