"""docs/measured.md is what the committed results amount to."""

from __future__ import annotations

import re
from typing import Any

from benchmarks import report
from benchmarks.page.page import build_page
from benchmarks.page.results import Spread, summarise_rounds

FIGURES = report.PAGE.with_suffix("")
MAX_NBYTES = 100_000

CASE = {"file_system": "ext4", "nbytes": 10**9, "num_arrays": 3, "num_ranks": 2}


def sample(candidate: str, seconds: float, repetition: int = 1, **more: Any) -> dict[str, Any]:
    about = {"candidate": candidate, "repetition": repetition, "case": CASE}
    return {"kind": "sample", "step": "save", **about, "seconds": seconds, **more}


def test_the_page_is_what_the_committed_results_amount_to() -> None:
    made = build_page(report.RESULTS)

    assert report.PAGE.read_text(encoding="utf-8") == made.text
    names = re.findall(r"\]\(measured/(\w+)\.svg\)", made.text)
    assert sorted(names) == sorted(figure.name for figure in made.figures)


def test_every_figure_is_drawn_from_the_committed_results() -> None:
    made = build_page(report.RESULTS)

    assert {path.stem for path in FIGURES.iterdir()} == {figure.name for figure in made.figures}
    for figure in made.figures:
        path = FIGURES / f"{figure.name}.svg"
        assert f">{figure.digest}<" in path.read_text(encoding="utf-8"), path
        assert path.stat().st_size <= MAX_NBYTES, path


def test_ratios_are_taken_within_a_round_and_only_of_rounds_that_both_have() -> None:
    baseline = [sample("raw write", s, n) for n, s in ((1, 1.0), (2, 2.0), (3, 4.0))]
    ours = [sample("zarr 1", s, n) for n, s in ((1, 3.0), (2, 4.0))]

    first, second = summarise_rounds([*ours, *baseline], ("raw write", "absent"))

    assert (first.candidate, first.num_rounds, first.seconds) == ("raw write", 3, Spread(2, 1, 4))
    assert second.ratios == {"raw write": Spread(2.5, 2.0, 3.0)}
