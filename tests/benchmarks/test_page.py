"""docs/measured.md is what the committed results amount to."""

from __future__ import annotations

import re

from benchmarks import report
from benchmarks.page.page import build_page
from benchmarks.page.results import Found, Spread
from benchmarks.page.subjects import Subject

FIGURES = report.PAGE.with_suffix("")
MAX_NBYTES = 100_000


def test_the_page_is_what_the_committed_results_amount_to() -> None:
    text, figures = build_page(report.RESULTS)

    assert report.PAGE.read_text(encoding="utf-8") == text
    names = re.findall(r"\]\(measured/(\w+)\.svg\)", text)
    assert sorted(names) == sorted(figure.name for figure in figures)


def test_every_figure_is_drawn_from_the_committed_results() -> None:
    _, figures = build_page(report.RESULTS)

    assert {path.stem for path in FIGURES.iterdir()} == {figure.name for figure in figures}
    for figure in figures:
        path = FIGURES / f"{figure.name}.svg"
        assert f">{figure.digest}<" in path.read_text(encoding="utf-8"), path
        assert path.stat().st_size <= MAX_NBYTES, path


def test_ratios_are_taken_within_a_round_and_only_of_rounds_that_both_have() -> None:
    case = {"file_system": "ext4", "nbytes": 10**9, "num_arrays": 3, "num_ranks": 2}
    seconds = {"raw read": {1: 1.0, 2: 2.0, 3: 4.0}, "zarr 2": {1: 3.0, 2: 4.0}}
    lines = [
        {"kind": "sample", "step": "load warm", "candidate": name, "repetition": number}
        | {"values": {"seconds": value}, "case": case}
        for name, values in seconds.items()
        for number, value in values.items()
    ]

    first, second = Subject("x", "X", "words", "raw read", "absent").rows(Found(tuple(lines)))

    assert (first.candidate, first.seconds) == ("raw read", Spread(2, 1, 4))
    assert (second.candidate, second.ratios) == ("zarr 2", {"raw read": Spread(2.5, 2.0, 3.0)})
    assert second.label == "1 GB, 3 arrays, 2 ranks, ext4: load warm"
