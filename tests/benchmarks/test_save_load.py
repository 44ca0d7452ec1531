from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.scripts import Results, command, results_of

SCRIPT = "save_load.py"
STEPS_ON_DISK = {"save", "load warm", "load cold"}

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(SCRIPT, tmp_path_factory.mktemp("run"))


def test_the_first_line_says_what_was_run_and_where(results: Results) -> None:
    run = results.lines[0]
    assert run["kind"] == "run"
    assert "--smoke" in run["command"]
    assert run["versions"]["torch"]
    assert run["machine"]["num_cores"] >= 1


def test_every_step_of_our_backend_is_sampled_and_summed_up(results: Results) -> None:
    for kind in ("sample", "summary"):
        ours = [x for x in results.of_kind(kind) if x["contender"] == "zarr 1"]
        steps = {line["step"] for line in ours}
        assert steps in (STEPS_ON_DISK, STEPS_ON_DISK - {"load cold"})
        assert all(line["seconds"] > 0 for line in ours)
        assert all(line["case"]["num_arrays"] == 27 for line in ours)


def test_a_save_that_does_not_flush_takes_longer_to_be_durable(results: Results) -> None:
    samples = [x for x in results.of_kind("sample") if x["step"] == "save"]
    by_name = {sample["contender"]: sample for sample in samples}
    assert by_name["torch.save"]["durable_seconds"] > by_name["torch.save"]["seconds"]
    assert by_name["zarr 1"]["durable_seconds"] == by_name["zarr 1"]["seconds"]
    assert by_name["raw write"]["durable_seconds"] is None


def test_every_contender_is_measured_or_said_to_be_missing(results: Results) -> None:
    named = {x["contender"] for x in results.of_kind("sample") + results.of_kind("skipped")}
    assert named == {
        *("raw write+fsync", "raw write", "zarr 1", "zarr 2", "torch_dist"),
        *("torch dcp", "torch.save", "safetensors", "raw write+fsync in Megatron-Core"),
    }


def test_nothing_is_left_behind(results: Results) -> None:
    assert results.left == []


def test_a_run_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ("--contender", "torch.save", "--repetitions", "1000")
    started = [*command(SCRIPT, tmp_path, *options), "--no-smoke", "--size", "0.01"]
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
