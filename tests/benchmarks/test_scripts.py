"""Each benchmark at toy size: everyone takes part, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    async_save,
    local_replicated,
    object_stores,
    reshard,
    tools,
    two_stage,
)
from benchmarks.candidates import one_state
from tests.support.scripts import Results, command, results_of

pytestmark = pytest.mark.multiprocess

WHY_NO_MOTO = object_stores.why_not(object_stores.MOTO)


def measured(results: Results) -> dict[str, list[dict[str, Any]]]:
    """The samples by candidate, those without any being said to be missing."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in results.of_kind("skipped"):
        found[line["candidate"]] = []
    for line in results.of_kind("sample"):
        assert line["values"]["seconds"] > 0
        found.setdefault(line["candidate"], []).append(line)
    assert results.left == []
    return found


@pytest.mark.parametrize(
    ("script", "options", "candidates"),
    [
        ("save_load.py", (), set(one_state.MAKERS)),
        ("async_save.py", (), set(async_save.MAKERS)),
        ("scaling.py", (), None),
        (
            "two_stage.py",
            ("--ranks", "3"),
            {two_stage.READ_SHARES, two_stage.SEND_SHARES, *two_stage.MAKERS},
        ),
        ("reshard.py", ("--move", "2 rows to 2 columns"), set(reshard.MAKERS)),
        ("local_replicated.py", (), set(local_replicated.NAMES)),
        ("tools.py", (), {*tools.BASELINES, *(n for own in tools.SOURCES.values() for n in own)}),
        pytest.param(
            *("object_stores.py", ("--server", object_stores.MOTO), set(object_stores.MAKERS)),
            marks=pytest.mark.skipif(WHY_NO_MOTO is not None, reason=str(WHY_NO_MOTO)),
        ),
    ],
)
def test_every_candidate_is_measured_or_said_to_be_missing(
    script: str, options: tuple[str, ...], candidates: set[str] | None, tmp_path: Path
) -> None:
    found = measured(results_of(script, tmp_path, *options))

    assert found
    one_core_only = {async_save.TRAINING}  # left out where there is no second core
    assert candidates is None or set(found) - one_core_only == candidates


@pytest.mark.parametrize(
    ("script", "kind", "is_told_where"),
    [
        ("startup.py", "summary", True),
        ("walk.py", "walk", True),
        ("planning.py", "planning", False),
        ("recovery_overhead.py", "summary", False),
    ],
)
def test_a_script_writes_its_lines_and_leaves_nothing(
    script: str, kind: str, is_told_where: bool, tmp_path: Path
) -> None:
    results = results_of(script, tmp_path, is_told_where=is_told_where)

    assert results.of_kind(kind)
    assert results.left == []


def test_a_run_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ("--candidate", "torch.save", "--repetitions", "1000")
    started = [*command("save_load.py", tmp_path, *options), "--no-smoke", "--size", "0.01"]
    process = subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(tmp_path.iterdir()) != []
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []
