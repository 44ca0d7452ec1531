from __future__ import annotations

import os
import threading

import pytest
import torch

from benchmarks.contenders.roster import ASYNC_PACKAGES, BLOCKING_ONLY, TRAINING_ONLY
from benchmarks.measuring.training_steps import Schedule, run_beside
from tests.support.scripts import Results, results_of

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="there is one core only")
slow = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("async_save.py", tmp_path_factory.mktemp("run"), limit_s=240)


class TestScript:
    pytestmark = slow

    def test_every_contender_is_measured_or_said_to_be_missing(self, results: Results) -> None:
        left_out = {x["contender"] for x in results.of_kind("skipped")}
        parts = {"blocking": TRAINING_ONLY, "training": BLOCKING_ONLY}
        for part, others in parts.items():
            if part not in left_out:
                samples = [x for x in results.of_kind("sample") if x["step"] == part]
                named = {x["contender"] for x in samples}
                assert named == set(ASYNC_PACKAGES) - others - left_out

    def test_what_blocks_is_part_of_what_it_takes(self, results: Results) -> None:
        samples = [x["values"] for x in results.of_kind("sample") if x["step"] == "blocking"]
        assert samples
        assert all(0 < x["seconds"] < x["until_there"] for x in samples)

    @needs_two_cores
    def test_every_step_of_training_is_written(self, results: Results) -> None:
        steps = {x["contender"]: x for x in results.of_kind("steps")}
        samples = {x["contender"]: x for x in results.of_kind("sample") if x["step"] == "training"}
        assert set(steps) == set(samples)
        for name, sample in samples.items():
            assert len(steps[name]["during"]) == sample["values"]["num_steps"]
            assert len(steps[name]["before"]) == len(steps[name]["after"]) == 3

    def test_nothing_is_left_behind(self, results: Results) -> None:
        assert results.left == []


@needs_two_cores
def test_what_a_save_starts_stays_off_the_core_of_training() -> None:
    found: dict[str, set[int]] = {}
    stop = threading.Event()

    def note(name: str) -> None:
        stop.wait(30)
        found[name] = os.sched_getaffinity(0)

    threads = [threading.Thread(target=note, args=(name,)) for name in ("old", "new")]
    threads[0].start()
    schedule = Schedule(CORES[-1], CORES[0], 0.001, 2)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would share the one core
    try:
        steps = run_beside(schedule, threads[1].start, lambda: True, stop.set)
    finally:
        stop.set()
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, set(CORES))
        for thread in threads:
            thread.join()
    assert found == {"old": {CORES[0]}, "new": {CORES[0]}}
    assert (len(steps.before), len(steps.during), len(steps.after)) == (2, 1, 2)
