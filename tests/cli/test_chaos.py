"""Ranks that fail at every point of a step, under the real launcher: nothing is lost."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dist_ckpt_strategies.cli.chaos.demo import BOTH_HOLDERS, WHOLE_REPLICA, Scene, run_chaos_demo
from dist_ckpt_strategies.cli.chaos.faults import (
    FaultInjector,
    InjectedError,
    InjectedFault,
    Kind,
    Point,
    every_fault,
    random_faults,
)
from dist_ckpt_strategies.cli.chaos.job import Outcome, differences, recovery_seconds
from dist_ckpt_strategies.cli.chaos.task import ChaosTask

WHOLE = Outcome(
    exit_code=0,
    output=(),
    events=tuple({"event": "loss", "at": 0.0, "rank": r, "step": 0, "loss": "0x1"} for r in (0, 1)),
    found_gone=(),
    digests={0: {"weights": "a"}, 1: {"weights": "b"}},
    seconds=1.0,
)


def played(single: tuple[Scene, ...], several: tuple[Scene, ...]) -> tuple[int, str]:
    """Status and output of the demonstration with these scenes."""
    console = Console(file=io.StringIO(), width=150)
    status = run_chaos_demo(console, single, several)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_exceptions_at_every_point_and_a_kill_lose_nothing() -> None:
    exceptions = Scene("exception", every_fault([Kind.EXCEPTION], [3]))
    last = exceptions.faults[-1]
    kill = replace(last, number=last.number + 1, step=last.step + 1, kind=Kind.KILL)
    status, text = played((replace(exceptions, faults=(*exceptions.faults, kill)),), ())

    assert status == 0, text
    assert "8 faults, nothing lost" in text


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_replica_comes_from_memory_and_two_lost_holders_from_the_disk() -> None:
    status, text = played((), (WHOLE_REPLICA, BOTH_HOLDERS))

    assert status == 0, text
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith("yes")]
    assert [row[-2] for row in rows] == ["memory", "disk"]


def test_the_same_seed_gives_the_same_faults_and_they_survive_being_written(
    tmp_path: Path,
) -> None:
    faults = random_faults(3, 40, 4, tuple(Kind))
    task = ChaosTask(tmp_path / "run", 9, 5, faults, 2, 0.5)

    assert faults == random_faults(3, 40, 4, tuple(Kind)) != random_faults(4, 40, 4, tuple(Kind))
    assert ChaosTask.read(task.write()) == task
    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.point for fault in faults} == set(Point)


def test_a_fault_happens_once_however_often_its_point_is_reached(tmp_path: Path) -> None:
    fault = InjectedFault(0, 4, Point.BACKWARD, Kind.EXCEPTION, (1, 2))
    noted: list[InjectedFault] = []

    def injector(rank: int) -> FaultInjector:
        return FaultInjector((fault,), rank, tmp_path, noted.append)

    injector(0).reach(4, Point.BACKWARD)
    injector(1).reach(4, Point.FORWARD)
    injector(1).reach(5, Point.BACKWARD)
    assert not noted
    with pytest.raises(InjectedError):
        injector(1).reach(4, Point.BACKWARD)
    with pytest.raises(InjectedError):
        injector(2).reach(4, Point.BACKWARD)
    injector(1).reach(4, Point.BACKWARD)

    assert noted == [fault, fault]


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
def test_whatever_is_not_as_without_a_fault_is_told(
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
    fault = InjectedFault(0, 0, Point.FORWARD, Kind.KILL, (2,))
    outcome = replace(WHOLE, events=tuple(lines), found_gone=(1.5,))

    assert recovery_seconds(outcome, [fault]) == {0: 4.0}
    assert recovery_seconds(outcome, [replace(fault, kind=Kind.STOP)]) == {0: 3.5}
    assert recovery_seconds(replace(outcome, events=tuple(lines[:5])), [fault]) == {0: None}
    assert json.dumps(fault.to_json())
