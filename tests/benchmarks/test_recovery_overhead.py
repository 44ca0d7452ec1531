"""The benchmark of recovery's cost, at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recovery_overhead
from benchmarks.recovery_overhead import NAMES, PLAIN, RECOVERY, Round, summarise


@pytest.mark.multiprocess
def test_every_contender_is_measured_and_compared_with_none(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = [sys.executable, recovery_overhead.__file__, "--smoke", "--out", str(out)]
    subprocess.run(command, check=True, timeout=250, stdout=subprocess.DEVNULL)
    lines = [json.loads(text) for text in out.read_text().splitlines()]

    rounds = [line for line in lines if line["kind"] == "round"]
    summaries = [line for line in lines if line["kind"] == "summary"]
    assert {line["contender"] for line in rounds} == set(NAMES)
    assert {line["contender"] for line in summaries} == set(NAMES) - {PLAIN}
    assert {line["vote_nbytes"] for line in summaries} == {4}
    assert all(5000 < line["mirrored_nbytes"] < 20_000 for line in summaries)


def test_the_cost_is_the_difference_within_a_round() -> None:
    rounds = [
        Round(name, repetition, 10, ms)
        for repetition, both in enumerate([(2.0, 3.0), (9.0, 11.0), (4.0, 5.5)])
        for name, ms in zip((PLAIN, RECOVERY), both, strict=True)
    ]
    rounds += [Round(NAMES[2], repetition, 10, 20.0) for repetition in range(3)]

    recovery, _ = summarise(rounds, (5, 4))

    assert recovery.contender == RECOVERY
    assert (recovery.ms_per_step, recovery.share) == (1.5, 0.003)
