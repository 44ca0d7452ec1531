"""The figures of docs/scale.md are those of the results files."""

from __future__ import annotations

import pytest

from benchmarks.page.results import find_results
from benchmarks.scale_page import PAGE, PLANNERS, RESULTS, STARTUP, page_with, tables


def test_every_table_of_the_page_comes_from_a_results_file() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert (
        page_with(page, tables(find_results(RESULTS, PLANNERS), find_results(RESULTS, STARTUP)))
        == page
    )


def test_a_table_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="0 places for the table 'other'"):
        page_with("<!-- job -->\nold\n<!-- end -->", {"job": "new", "other": "new"})


def test_a_table_replaces_the_one_before() -> None:
    page = "<!-- a -->\nold\n<!-- end -->\ntext\n<!-- b -->\nkept\n<!-- end -->"

    assert page_with(page, {"a": "1\n2"}) == page.replace("old", "1\n2")
