from __future__ import annotations

from benchmarks.contenders.roster import (
    PARALLEL,
    READ_SHARES,
    SEND_SHARES,
    TWO_STAGE_ZARR,
)
from benchmarks.measuring.group_timings import FLOOR, build_group_table, summarise_group
from benchmarks.measuring.timings import Case, Sample, Step

SECONDS = {
    READ_SHARES: (1.0, 30.0, 3.0),
    SEND_SHARES: (2.0, 10.0, 5.0),
    TWO_STAGE_ZARR: (3.0, 45.0, 10.0),
    PARALLEL: (6.0, 180.0, 20.0),
}


def samples_of(*names: str) -> list[Sample]:
    return [
        Sample(Step.LOAD_WARM, name, repetition, seconds, None)
        for name in names
        for repetition, seconds in enumerate(SECONDS[name], start=1)
    ]


def test_the_floor_of_each_round_is_the_longer_part_of_that_round() -> None:
    by_name = {s.contender: s for s in summarise_group(samples_of(*SECONDS))}

    assert by_name[FLOOR].seconds == 5.0
    assert by_name[READ_SHARES].floor_ratio == 0.6
    assert by_name[TWO_STAGE_ZARR].floor_ratio == 1.5
    assert by_name[TWO_STAGE_ZARR].peer_ratios == {PARALLEL: 0.5}


def test_the_floor_comes_after_its_parts_and_before_the_others() -> None:
    names = [summary.contender for summary in summarise_group(samples_of(*SECONDS))]

    assert names == [READ_SHARES, SEND_SHARES, FLOOR, TWO_STAGE_ZARR, PARALLEL]


def test_targets_stand_beside_our_ratios_alone() -> None:
    case = Case("tmpfs", 10**9, 291, 2, 2)
    table = build_group_table(case, summarise_group(samples_of(*SECONDS)))

    floor_cells = list(table.columns[2].cells)
    assert floor_cells == ["0.60", "1.00", "1.00", "1.50 (<= 1.5)", "4.00"]
    assert list(table.columns[3].cells)[3] == "0.50 (<= 0.35)"


def test_without_a_peer_there_is_no_ratio_to_one() -> None:
    found = summarise_group(samples_of(READ_SHARES, SEND_SHARES, TWO_STAGE_ZARR))

    assert [summary.peer_ratios for summary in found] == [{}] * 4
