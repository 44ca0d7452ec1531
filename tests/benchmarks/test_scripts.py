"""Each benchmark at toy size: everyone takes part, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    async_save,
    local_replicated,
    object_stores,
    recovery_overhead,
    reshard,
    scaling,
    startup,
    tools,
    two_stage,
)
from benchmarks.contenders.one_state import MAKERS, RAW_PLAIN
from tests.support.scripts import Results, command, results_of, run_script

pytestmark = pytest.mark.multiprocess

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="there is one core only")
WHY_NO_MOTO = object_stores.why_not(object_stores.MOTO)


def measured(results: Results) -> dict[str, list[dict[str, Any]]]:
    """The samples by contender, those without any being said to be missing."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in results.of_kind("skipped"):
        found[line["contender"]] = []
    for line in results.of_kind("sample"):
        assert line["values"]["seconds"] > 0
        found.setdefault(line["contender"], []).append(line)
    assert results.left == []
    return found


def test_saves_and_loads(tmp_path: Path) -> None:
    results = results_of("save_load.py", tmp_path)
    run, found = results.lines[0], measured(results)

    assert (run["kind"], "--smoke" in run["command"]) == ("run", True)
    assert run["versions"]["torch"]
    assert set(found) == set(MAKERS)
    steps = {line["step"] for line in found["zarr 1"]}
    assert steps in ({"save", "load warm", "load cold"}, {"save", "load warm"})
    durable = {
        name: {x["values"].get("durable_seconds", 0) - x["values"]["seconds"] for x in lines}
        for name in ("torch.save", "zarr 1", RAW_PLAIN)
        if (lines := [x for x in found[name] if x["step"] == "save"])
    }
    assert min(durable["torch.save"]) > 0
    assert durable["zarr 1"] == {0}
    assert max(durable[RAW_PLAIN]) < 0  # what it leaves to the kernel is not waited for


def test_more_of_everything(tmp_path: Path) -> None:
    found = measured(results_of("scaling.py", tmp_path))

    cases = [line["case"] for lines in found.values() for line in lines]
    extents = {(case["sweep"], case["num_arrays"], case["num_ranks"]) for case in cases}
    assert extents == {("bytes", 6, 2), ("ranks", 6, 1)}


@pytest.mark.parametrize("sweep", scaling.SWEEPS)
def test_one_thing_grows_and_the_others_stay(sweep: str) -> None:
    extents = [(one.nbytes, one.num_arrays, one.num_ranks) for one in scaling.SWEEPS[sweep]]

    grows = [len(set(values)) > 1 for values in zip(*extents, strict=True)]
    assert grows.count(True) == 1
    assert extents == sorted(extents)


def test_loads_by_replicas(tmp_path: Path) -> None:
    found = measured(results_of("two_stage.py", tmp_path, "--ranks", "3"))

    assert set(found) == {two_stage.READ_SHARES, two_stage.SEND_SHARES, *two_stage.MAKERS}
    for line in (line for lines in found.values() for line in lines):
        assert (line["case"]["num_ranks"], line["case"]["num_replicas"]) == (3, 3)
        is_memory = line["case"]["file_system"] == "tmpfs"
        assert line["step"] == ("load warm" if is_memory else "load cold")


def test_loads_in_another_layout(tmp_path: Path) -> None:
    found = measured(results_of("reshard.py", tmp_path, "--move", "2 rows to 2 columns"))

    assert set(found) == set(reshard.MAKERS)
    for name, lines in found.items():
        for line in lines:  # these are toy sizes: metadata is most of what is read
            is_plain = line["values"]["read_by_calls"] < 1.1
            assert is_plain is (name == reshard.READ_SHARES)


def test_asynchronous_saves(tmp_path: Path) -> None:
    results = results_of("async_save.py", tmp_path, limit_s=240)
    found = measured(results)

    assert set(found) - {async_save.TRAINING} == set(async_save.MAKERS)
    by_step = {(x["contender"], x["step"]): x["values"] for x in results.of_kind("sample")}
    for (_, step), values in by_step.items():
        if step == async_save.BLOCKING:
            assert values["seconds"] < values["until_there"]
    for line in results.of_kind("steps"):
        values = by_step[line["contender"], async_save.TRAINING]
        assert len(line["during"]) == values["num_steps"]
        assert len(line["before"]) == len(line["after"]) == 3


@needs_two_cores
def test_what_a_save_starts_stays_off_the_core_of_training() -> None:
    found: dict[str, set[int]] = {}
    stop = threading.Event()

    def note(name: str) -> None:
        stop.wait(30)
        found[name] = os.sched_getaffinity(0)

    threads = [threading.Thread(target=note, args=(name,)) for name in ("old", "new")]
    threads[0].start()
    schedule = async_save.Schedule(CORES[-1], CORES[0], 0.001, 2)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would share the one core
    try:
        steps = async_save.run_beside(schedule, threads[1].start, lambda: True, stop.set)
    finally:
        stop.set()
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, set(CORES))
        for thread in threads:
            thread.join()
    assert found == {"old": {CORES[0]}, "new": {CORES[0]}}
    assert (len(steps.before), len(steps.during), len(steps.after)) == (2, 1, 2)


def test_local_checkpoints(tmp_path: Path) -> None:
    found = measured(results_of("local_replicated.py", tmp_path))

    assert set(found) == set(local_replicated.NAMES)
    assert {x["step"] for x in found["local manager"]} == set(local_replicated.STEPS)


def test_tools(tmp_path: Path) -> None:
    found = measured(results_of("tools.py", tmp_path, limit_s=240))

    for source, own in tools.SOURCES.items():
        names = {n for n, all_ in found.items() if any(x["case"]["source"] == source for x in all_)}
        assert names == {*own, *tools.BASELINES}
    for values in (line["values"] for lines in found.values() for line in lines):
        assert 0 < values["before_nbytes"] <= values["peak_nbytes"]


def test_plain_reads_and_copies_take_every_byte(tmp_path: Path) -> None:
    contents = {f"d{number}/file": bytes([number]) * 5_000_000 * number for number in range(4)}
    source, target = tmp_path / "source", tmp_path / "target"
    for name, content in contents.items():
        (source / name).parent.mkdir(parents=True)
        (source / name).write_bytes(content)
    total = sum(map(len, contents.values()))
    assert tools.read_files(source, 2) == total
    assert tools.copy_files(source, target, 2) == total
    assert {name: (target / name).read_bytes() for name in contents} == contents


@pytest.mark.skipif(WHY_NO_MOTO is not None, reason=str(WHY_NO_MOTO))
def test_object_stores(tmp_path: Path) -> None:
    found = measured(results_of("object_stores.py", tmp_path, "--server", object_stores.MOTO))

    assert set(found) == set(object_stores.MAKERS)
    assert all({x["step"] for x in lines} == {"save", "load"} for lines in found.values())


@pytest.mark.skipif(WHY_NO_MOTO is not None, reason=str(WHY_NO_MOTO))
def test_a_checkpoint_is_deleted_and_its_neighbour_stays(tmp_path: Path) -> None:
    with object_stores.open_store(object_stores.MOTO, tmp_path) as store:
        store.make_bucket("bucket")
        for name in ("a/1", "a/2", "ab/1"):
            store.put("bucket", name, b"x")
        object_stores.delete_below(store.client(), "bucket", "a")
        assert store.names("bucket") == ["ab/1"]


def test_start_up(tmp_path: Path) -> None:
    results = results_of("startup.py", tmp_path)

    names = set(startup.commands(tmp_path))
    assert {line["name"] for line in results.of_kind("sample")} == names
    assert {line["name"] for line in results.of_kind("summary")} == names
    assert results.left == []


def test_plans_are_made_for_all_shards_of_the_job(tmp_path: Path) -> None:
    costs = results_of("planning.py", tmp_path, is_told_where=False).of_kind("planning")

    # 16 ranks at TP 8: 60 weights on each, and 20 optimizer buffers, each on two ranks.
    # Rank 0 holds two of the buffers (64 and 72).
    assert {cost["planner"]: cost["num_shards"] for cost in costs} == {
        "save, format 1": 16 * 60 + 20 * 2,
        "save, format 2": 16 * 60 + 20 * 2,
        "load": 60 + 2,
        "two-stage load": 2 * (60 + 2),
    }
    assert all(cost["cpu_seconds"] > 0 for cost in costs)


def test_the_cost_of_recovery_is_the_difference_within_a_round(tmp_path: Path) -> None:
    results = results_of("recovery_overhead.py", tmp_path, is_told_where=False)
    plain, recovery, checksums = recovery_overhead.NAMES

    assert {x["contender"] for x in results.of_kind("round")} == {plain, recovery, checksums}
    assert {x["contender"] for x in results.of_kind("summary")} == {recovery, checksums}
    rounds = {(plain, 0): 2.0, (recovery, 0): 3.0, (plain, 1): 9.0, (recovery, 1): 11.0}
    rounds |= {(plain, 2): 4.0, (recovery, 2): 5.5}
    rounds |= {(checksums, number): 20.0 for number in range(3)}
    assert recovery_overhead.costs(rounds) == {recovery: 1.5, checksums: 16.0}


@pytest.mark.parametrize(
    ("script", "option", "word"),
    [("save_load.py", "--contender", "tape"), ("reshard.py", "--move", "sideways")],
)
def test_an_unknown_name_is_refused(script: str, option: str, word: str, tmp_path: Path) -> None:
    done = run_script(script, tmp_path, option, word)

    assert done.returncode == 2
    assert repr(word) in done.stderr


def test_a_run_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ("--contender", "torch.save", "--repetitions", "1000")
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
