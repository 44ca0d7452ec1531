from __future__ import annotations

import pytest

from benchmarks.measuring.spans import MAIN, STORAGE, Span, joined, totals_of, with_rest


def span(begin: float, end: float, kind: str = "reading", lane: str = STORAGE) -> Span:
    return Span(lane, kind, begin, end)


def test_spans_that_overlap_or_are_close_are_one() -> None:
    found = joined([span(3, 4), span(0, 1), span(0.5, 2), span(2.1, 2.5)], 0.2)

    assert found == [span(0, 2.5), span(3, 4)]


def test_a_span_within_another_does_not_shorten_it() -> None:
    assert joined([span(0, 5), span(1, 2)], 0.0) == [span(0, 5)]


def test_kinds_and_lanes_stay_apart() -> None:
    spans = [span(0, 1, lane=MAIN), span(0, 1), span(0, 1, "flushing")]

    assert joined(spans, 1.0) == [
        span(0, 1, lane=MAIN),
        span(0, 1, "flushing"),
        span(0, 1),
    ]


def test_what_the_main_thread_does_in_between_is_the_rest() -> None:
    spans = [span(2, 3, "copying", MAIN), span(0, 9), span(4, 5, "copying", MAIN)]

    rest = [one for one in with_rest(spans, 1, 6) if one.kind == "the rest"]

    assert [(one.begin, one.end) for one in rest] == [(1, 2), (3, 4), (5, 6)]


def test_seconds_of_threads_side_by_side_count_once() -> None:
    assert totals_of([span(0, 2), span(1, 3), span(5, 6)]) == {"reading": pytest.approx(4)}
