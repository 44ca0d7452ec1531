"""A twentieth of the fault campaign: nothing but what was saved is ever loaded."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest
import typer
from rich.console import Console

from benchmarks.faults.campaign import ViolationError, reported_violations
from benchmarks.faults.local_damage import (
    Checkpoints,
    Damage,
    Hit,
    Place,
    Scope,
    complaint,
    file_map,
)
from benchmarks.faults.local_worker import fingerprint
from benchmarks.faults.outcomes import Ending, Outcome
from benchmarks.local_faults import FLIP, run_damage
from benchmarks.measuring.command_line import Output
from benchmarks.measuring.records import JsonLines
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.local.shard_files import ShardDirectory
from tests.local.test_shard_files import PART, written
from tests.support.scripts import results_of

SAVED = Checkpoints({}, {}, {}, (1, 2))
REFUSED = Outcome(Ending.REFUSED, text="NoReplicasAvailableError: none")
NEWEST, BEFORE = Outcome(Ending.LOADED, 2), Outcome(Ending.LOADED, 1)


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_twentieth_of_the_campaign_finds_no_violation(tmp_path: Path) -> None:
    found = results_of("local_faults.py", tmp_path, "--seed", "4", limit_s=280)
    counts: Counter[str] = Counter()
    for line in found.of_kind("class"):
        counts[line["fault"]] += line["cases"]
        is_hidden = line["what"] == "padding"
        if line["fault"] != "kill":
            assert (line["detected"] == 0, line["in_padding"] > 0) == (is_hidden, is_hidden)

    assert counts == {"flip": 100, "cut": 10, "kill": 10}
    assert (found.of_kind("violation"), found.left) == ([], [])


def damage(scope: Scope, place: Place) -> Damage:
    return Damage(0, scope, 0, place, (Hit(2, 0, 1),))


@pytest.mark.parametrize(
    ("scope", "place", "good"),
    [
        (Scope.ONE, Place.TENSOR, NEWEST),
        (Scope.BOTH, Place.DESCRIPTION, BEFORE),
        (Scope.BOTH, Place.PADDING, NEWEST),
        (Scope.ALL, Place.END, REFUSED),
        (Scope.ALL, Place.PADDING, NEWEST),
    ],
)
def test_every_other_end_than_the_right_one_is_a_violation(
    scope: Scope, place: Place, good: Outcome
) -> None:
    case, noticed = damage(scope, place), place is not Place.PADDING
    others = [NEWEST, BEFORE, REFUSED, Outcome(Ending.DIFFERENT, good.iteration)]

    assert complaint(SAVED, case, [noticed], [good] * 4) is None
    assert complaint(SAVED, case, [not noticed], [good] * 4) is not None
    for bad in (one for one in others if one != good):
        assert complaint(SAVED, case, [noticed], [good, good, bad, good]) is not None


def test_a_map_names_every_byte_of_a_part(tmp_path: Path) -> None:
    content = written(ShardDirectory(tmp_path)).read_bytes()
    spans = file_map(content)

    assert [(span.place, span.end - span.start) for span in spans] == [
        (Place.TENSOR, PART.buffers[0].nbytes),
        (Place.DESCRIPTION, len(content) - 32 - PART.buffers[0].nbytes),
        (Place.LAST_BYTES, 32),
    ]
    assert [a.end for a in spans[:-1]] == [b.start for b in spans[1:]]
    with pytest.raises(ValueError, match="described as one of 5000"):
        file_map(b"\0" + content)


def test_states_that_differ_in_a_bit_or_a_type_have_other_fingerprints() -> None:
    values = [{"a": [1, 2]}, {"a": (1, 2)}, {"a": [1, 2.0]}, {"a": [1, [2]]}, {"b": [1, 2]}]

    assert len({fingerprint(value) for value in values}) == len(values)


def test_a_violation_ends_with_status_1_and_says_case_and_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(ShardDirectory(tmp_path))
    case = Damage(7, Scope.ONE, 1, Place.TENSOR, (Hit(7, 4096, 3),))
    saved = Checkpoints({(7, 1): (path,)}, {}, {path: path.read_bytes()}, (6, 7))

    def load(_: Communicator) -> Outcome:
        return Outcome(Ending.DIFFERENT, 7)

    lines = io.StringIO()
    with (
        pytest.raises(typer.Exit) as ended,
        reported_violations(41, Output(JsonLines(lines), Console())),
    ):
        run_damage(load, saved, FLIP, case)

    assert ended.value.exit_code == 1
    assert "--seed 41" in capsys.readouterr().err
    line = json.loads(lines.getvalue())
    assert (line["kind"], line["seed"], line["fault"]) == ("violation", 41, "flip")
    assert "number=7" in line["case"]
    assert isinstance(ended.value.__cause__, ViolationError)
