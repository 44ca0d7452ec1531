from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "save_load.py"
STEPS_ON_DISK = {"save", "load warm", "load cold"}

pytestmark = pytest.mark.multiprocess


def command(directory: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--smoke", "--directory", str(directory), *options]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[Path]]:
    """The lines of one run at toy size, and what it left behind."""
    place = tmp_path_factory.mktemp("place")
    out = tmp_path_factory.mktemp("out") / "results.jsonl"
    done = subprocess.run(
        command(place, "--out", str(out)), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return lines_of(out), list(place.iterdir())


def test_the_first_line_says_what_was_run_and_where(
    results: tuple[list[dict[str, Any]], list[Path]],
) -> None:
    run = results[0][0]
    assert run["kind"] == "run"
    assert "--smoke" in run["command"]
    assert run["versions"]["torch"]
    assert run["machine"]["num_cores"] >= 1


def test_every_step_of_our_backend_is_sampled_and_summed_up(
    results: tuple[list[dict[str, Any]], list[Path]],
) -> None:
    for kind in ("sample", "summary"):
        ours = [x for x in results[0] if x["kind"] == kind and x["contender"] == "zarr 1"]
        steps = {line["step"] for line in ours}
        assert steps in (STEPS_ON_DISK, STEPS_ON_DISK - {"load cold"})
        assert all(line["seconds"] > 0 for line in ours)
        assert all(line["case"]["num_arrays"] == 27 for line in ours)


def test_a_save_that_does_not_flush_takes_longer_to_be_durable(
    results: tuple[list[dict[str, Any]], list[Path]],
) -> None:
    samples = [x for x in results[0] if x["kind"] == "sample" and x["step"] == "save"]
    by_name = {sample["contender"]: sample for sample in samples}
    assert by_name["torch.save"]["durable_seconds"] > by_name["torch.save"]["seconds"]
    assert by_name["zarr 1"]["durable_seconds"] == by_name["zarr 1"]["seconds"]
    assert by_name["raw write"]["durable_seconds"] is None


def test_every_contender_is_measured_or_said_to_be_missing(
    results: tuple[list[dict[str, Any]], list[Path]],
) -> None:
    named = {x["contender"] for x in results[0] if x["kind"] in {"sample", "skipped"}}
    assert named == {
        *("raw write+fsync", "raw write", "zarr 1", "torch_dist"),
        *("torch dcp", "torch.save", "safetensors"),
    }


def test_nothing_is_left_behind(results: tuple[list[dict[str, Any]], list[Path]]) -> None:
    assert results[1] == []


def test_a_run_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ("--contender", "torch.save", "--repetitions", "1000")
    started = [*command(tmp_path, *options), "--no-smoke", "--size", "0.01"]
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


def test_an_unknown_contender_is_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--contender", "tape"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "'tape'" in done.stderr
