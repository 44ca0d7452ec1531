from __future__ import annotations

import pytest

from benchmarks.measuring.measures import (
    SECONDS,
    Column,
    Measure,
    build_measure_table,
    summarise_measures,
)

FLOOR, OURS = "floor", "ours"
SECONDS_OF = {FLOOR: [1.0, 4.0, 2.0], OURS: [3.0, 4.0, 4.0]}
MEASURES = [
    Measure("save", name, repetition, {SECONDS: seconds[repetition], "peak": 10.0 * repetition})
    for repetition in (2, 0, 1)
    for name, seconds in SECONDS_OF.items()
]


def test_ratios_are_taken_within_each_round() -> None:
    summaries = summarise_measures(MEASURES, (OURS, FLOOR), (FLOOR,))
    assert [summary.contender for summary in summaries] == [OURS, FLOOR]
    assert summaries[0].ratios == {FLOOR: pytest.approx(2.0)}  # of 3, 1 and 2
    assert summaries[1].ratios == {FLOOR: 1.0}
    assert summaries[0].medians == {SECONDS: 4.0, "peak": 10.0}
    assert summaries[0].maxima == {SECONDS: 4.0, "peak": 20.0}


def test_a_floor_that_did_not_take_part_in_a_step_gives_no_ratio() -> None:
    alone = [Measure("load", OURS, 0, {SECONDS: 1.0})]
    summaries = summarise_measures([*MEASURES, *alone], (FLOOR, OURS), (FLOOR,))
    assert [(x.step, x.contender) for x in summaries] == [
        ("save", FLOOR),
        ("save", OURS),
        ("load", OURS),
    ]
    assert summaries[2].ratios == {}


def test_the_table_has_a_row_for_each_summary() -> None:
    summaries = summarise_measures(MEASURES, (FLOOR, OURS), (FLOOR,))
    table = build_measure_table("title", summaries, [Column("n", lambda x: str(x.num_samples))])
    assert [list(column.cells) for column in table.columns] == [
        ["save", ""],
        [FLOOR, OURS],
        ["3", "3"],
    ]
