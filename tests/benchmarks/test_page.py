"""docs/measured.md is what the committed results amount to."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.common.command_line import ROOT
from benchmarks.page.page import build_page
from benchmarks.page.results import Spread, summarise_rounds

DOCS = ROOT / "docs"
FIGURES = DOCS / "measured"
MAX_NBYTES = 100_000

CASE = {"file_system": "ext4", "nbytes": 10**9, "num_arrays": 3, "num_ranks": 2}


def sample(candidate: str, seconds: float, repetition: int = 1, **more: Any) -> dict[str, Any]:
    about = {"candidate": candidate, "repetition": repetition, "case": CASE}
    return {"kind": "sample", "step": "save", **about, "seconds": seconds, **more}


def test_the_page_is_what_the_committed_results_amount_to() -> None:
    made = build_page(report.RESULTS)

    assert (DOCS / report.PAGE_NAME).read_text(encoding="utf-8") == made.text
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


@pytest.mark.parametrize("stem", report.BENCHMARKS)
def test_a_script_knows_the_options_that_it_gets(stem: str) -> None:
    main = import_module(f"benchmarks.{stem}").main

    command = report.command_of(stem, Path("out.jsonl"), smoke=True)
    options = {text[2:].replace("-", "_") for text in command if text.startswith("--")}
    assert {"out", "smoke"} <= options <= set(inspect.signature(main).parameters)
