"""A twentieth of the campaign: training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery_faults import Outcome, differences
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
