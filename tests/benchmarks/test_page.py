"""docs/measured.md is what the committed results amount to."""

import re

from benchmarks import report
from benchmarks.page.page import build_page

FIGURES = report.PAGE.with_suffix("")
MAX_NBYTES = 100_000


def test_the_page_and_its_figures_are_what_the_committed_results_amount_to() -> None:
    text, figures = build_page(report.RESULTS)

    assert report.PAGE.read_text(encoding="utf-8") == text
    names = sorted(figure.name for figure in figures)
    assert sorted(re.findall(r"\]\(measured/(\w+)\.svg\)", text)) == names
    assert sorted(path.stem for path in FIGURES.iterdir()) == names
    for figure in figures:
        path = FIGURES / f"{figure.name}.svg"
        assert f">{figure.digest}<" in path.read_text(encoding="utf-8"), path
        assert path.stat().st_size <= MAX_NBYTES, path
