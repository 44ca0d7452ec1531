"""Each benchmark at toy size: every candidate takes part, and nothing is left behind."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    async_save,
    local_replicated,
    object_stores,
    reshard,
    save_load,
    tools,
    two_stage,
)
from tests.support.processes import finished, until

pytestmark = pytest.mark.multiprocess

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NEEDS_MOTO = pytest.mark.skipif(
    not (find_spec("moto") and find_spec("boto3")), reason="moto and boto3 are not installed"
)


@dataclass(frozen=True)
class Results:
    """The lines that a run wrote, and what it left behind where it worked."""

    lines: list[dict[str, Any]]
    left: list[Path]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def command(script: str, directory: Path | None, *options: str) -> list[str]:
    place = () if directory is None else ("--directory", str(directory))
    return [sys.executable, str(BENCHMARKS / script), *place, *options]


def results_of(
    script: str,
    directory: Path,
    *options: str,
    limit_s: float = 250,
    takes_directory: bool = True,
) -> Results:
    """Of a run that works in one new directory below ``directory``, and writes to another."""
    place, out = directory / "place", directory / "results.jsonl"
    place.mkdir()
    where = place if takes_directory else None
    line = command(script, where, "--smoke", "--out", str(out), *options)
    finished(*line, limit_s=limit_s)
    texts = out.read_text(encoding="utf-8").splitlines()
    return Results([json.loads(text) for text in texts], list(place.iterdir()))


@pytest.mark.parametrize(
    ("script", "options", "candidates"),
    [
        ("save_load.py", (), save_load.MAKERS),
        ("async_save.py", (), async_save.MAKERS),
        ("two_stage.py", ("--ranks", "3"), two_stage.NAMES),
        ("reshard.py", ("--move", "2 rows to 2 columns"), reshard.MAKERS),
        ("local_replicated.py", (), local_replicated.NAMES),
        ("tools.py", (), tools.NAMES),
        pytest.param(
            *("object_stores.py", ("--server", object_stores.MOTO), object_stores.MAKERS),
            marks=NEEDS_MOTO,
        ),
    ],
)
def test_every_candidate_is_measured_or_reported_as_missing(
    script: str, options: tuple[str, ...], candidates: list[str], tmp_path: Path
) -> None:
    results = results_of(script, tmp_path, *options)

    samples = results.of_kind("sample")
    assert min(line["values"]["seconds"] for line in samples) > 0
    reported = [*samples, *results.of_kind("skipped")]
    assert {line["candidate"] for line in reported} == {*candidates}
    assert results.left == []


@pytest.mark.parametrize(
    ("script", "kind", "takes_directory"),
    [
        ("walk.py", "walk", True),
        ("planning.py", "planning", False),
        ("recovery_overhead.py", "summary", False),
    ],
)
def test_a_script_writes_its_lines_and_leaves_nothing(
    script: str, kind: str, takes_directory: bool, tmp_path: Path
) -> None:
    results = results_of(script, tmp_path, takes_directory=takes_directory)

    assert results.of_kind(kind)
    assert results.left == []


@pytest.mark.long
@pytest.mark.timeout(900)  # most faults cost a start of a process, on cores that others use
def test_a_twentieth_of_the_campaign_of_recovery_finds_no_violation(tmp_path: Path) -> None:
    found = results_of("recovery_faults.py", tmp_path, "--seed", "4", limit_s=880)

    assert len(found.of_kind("recovery")) == 25
    assert [line["faults"] for line in found.of_kind("campaign")] == [25]
    assert (found.of_kind("violation"), found.left) == ([], [])


def test_a_run_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ("--candidate", "zarr 1", "--repetitions", "1000", "--size", "0.01")
    started = command("save_load.py", tmp_path, *options)
    process = subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: list(tmp_path.glob("*/*")))  # ranks are at work
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []
