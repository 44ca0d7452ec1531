"""The options that benchmarks have in common, and what they come to."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks.common.command_line import NEEDED, Comparison, Output, among, comparison_command

GIVEN: list[tuple[Comparison, list[str] | None]] = []
NAMES = ("baseline", "ours", "theirs", "others")


@comparison_command(NAMES, ("baseline",), sizes_gb=(0.5,), in_memory=False, repetitions=3)
def compare(
    comparison: Comparison,
    output: Output,
    *,
    move: Annotated[list[str] | None, typer.Option(callback=among(("up", "down")))] = None,
) -> None:
    """Compare them."""
    output.console.print("compared")
    GIVEN.append((comparison, move))


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A benchmark leaves on SIGTERM by its own way; the tests do not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(*args: str) -> Result:
    app = typer.Typer()
    app.command()(compare)
    GIVEN.clear()
    return CliRunner().invoke(app, list(args))


def test_without_options_all_take_part_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDED, "theirs", "no_such_package")
    result = run()

    assert result.exit_code == 0, result.output
    ((comparison, move),) = GIVEN
    assert comparison.names == ("baseline", "ours", "others")
    assert "theirs: skipped, no_such_package is not installed" in result.output
    assert (len(comparison.sizes), len(comparison.places), comparison.repetitions) == (1, 1, 3)
    assert (comparison.timeout_s, comparison.is_smoke, move) == (300.0, False, None)


def test_options_replace_what_is_there_without_them(tmp_path: Path) -> None:
    words = "--size 1 --size 2 --repetitions 5 --timeout-s 7 --candidate others --move up"
    out = tmp_path / "out.jsonl"
    result = run(*words.split(), "--directory", str(tmp_path), "--out", str(out))

    assert result.exit_code == 0, result.output
    ((comparison, move),) = GIVEN
    assert comparison.names == ("baseline", "others")
    assert comparison.sizes[0].hidden < comparison.sizes[1].hidden
    assert (comparison.places, comparison.repetitions, comparison.timeout_s) == (
        (tmp_path,),
        5,
        7.0,
    )
    assert move == ["up"]
    assert json.loads(out.read_text().splitlines()[0])["kind"] == "run"


@pytest.mark.parametrize("words", ["--move sideways", "--candidate tape", "--repetitions 0"])
def test_what_is_not_known_is_refused_before_a_file_is_opened(words: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run(*words.split(), "--out", str(out))

    assert result.exit_code == 2
    assert not GIVEN
    assert not out.exists()
