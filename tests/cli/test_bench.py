"""``dist-ckpt bench``: what it shows, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.cli.bench import (
    BASELINE,
    CANDIDATES,
    STEPS,
    BenchError,
    BenchOptions,
    BenchTask,
    Sample,
    bench_directory,
    build_table,
    run_task,
    summarise,
)
from dist_ckpt_strategies.cli.bench_rank import build_parts
from dist_ckpt_strategies.cli.ranks import Event, RankError

COMMAND = [sys.executable, "-m", "dist_ckpt_strategies.cli", "bench"]
TIMED = [
    Sample(step, name, repetition, seconds, 1000, 7)
    for step in STEPS
    for name, by_round in (("one stream", (9.0, 1.0, 2.0, 4.0)), ("zarr 1", (9.0, 3.0, 4.0, 4.0)))
    for repetition, seconds in enumerate(by_round)
]


def test_timings_are_medians_over_the_measured_rounds() -> None:
    found = summarise(TIMED, (BASELINE, "zarr 1"))

    assert [(one.step, one.candidate) for one in found] == [
        *(("save", BASELINE), ("save", "zarr 1")),
        *(("load", BASELINE), ("load", "zarr 1")),
    ]
    baseline, ours = found[:2]
    assert (baseline.seconds, baseline.shortest, baseline.longest) == (2.0, 1.0, 4.0)
    assert baseline.baseline_ratio == 1.0
    assert (ours.seconds, ours.shortest, ours.longest) == (4.0, 3.0, 4.0)
    assert ours.baseline_ratio == 2.0  # of 3, 2 and 1, round by round
    assert ours.nbytes_per_second == 250.0


def test_the_table_has_a_row_for_each_timing() -> None:
    assert len(build_table(summarise(TIMED, (BASELINE, "zarr 1"))).rows) == 4


def test_rounds_go_forwards_and_backwards_in_turn() -> None:
    task = BenchTask(Path("a"), Path("b"), 1, 2, 1, ("x", "y"), 1.0)

    assert list(task.turns()) == [(0, "x"), (0, "y"), (1, "y"), (1, "x")]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_ranks_together_hold_about_the_size(num_ranks: int) -> None:
    parts = [build_parts(2_000_000, rank, num_ranks) for rank in range(num_ranks)]

    assert len({tuple(part.tensor.shape for part in own) for own in parts}) == 1
    nbytes = sum(part.tensor.nbytes for own in parts for part in own)
    assert nbytes == pytest.approx(2_000_000, rel=0.05)


def test_a_tensor_that_differs_is_not_as_saved() -> None:
    part = build_parts(10_000, 0, 1)[0]

    assert part.is_as_saved()
    part.tensor[0, 0] += 1
    assert not part.is_as_saved()


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(tmp_path / "none")])

    assert (result.exit_code, result.stdout) == (3, "")
    assert "none: expected a directory, found none" in result.stderr


def test_more_than_fits_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(tmp_path), "--size", "1e9"])

    assert result.exit_code == 3
    assert "of free space, found" in result.stderr
    assert list(tmp_path.iterdir()) == []


class Failing:
    """Ranks that write something and then fail with a given error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, task: BenchTask, on_event: Callable[[Event], None]) -> None:
        (task.workspace / "0").mkdir()
        (task.workspace / "0" / "rank0.bin").write_bytes(b"x")
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RankError("rank 1: OSError: no space\nthe end of its output:\n..."), BenchError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failure_leaves_the_directory_as_it_was(
    error: BaseException, raised: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("stays")
    options = BenchOptions(tmp_path, 1_000_000, 2, 1)

    with pytest.raises(raised) as found:
        bench_directory(options, as_json=True, start=Failing(error))

    assert "\n" not in str(found.value)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.multiprocess
def test_two_ranks_measure_every_candidate(tmp_path: Path) -> None:
    args = [str(tmp_path), "--size", "0.002", "--repetitions", "1"]
    done = subprocess.run([*COMMAND, *args, "--json"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["command"], found["path"], found["num_ranks"]) == ("bench", str(tmp_path), 2)
    names = [name for name in CANDIDATES if name not in found["lacking"]]
    expected = [(step, name) for step in STEPS for name in names]
    assert [(x["step"], x["contender"]) for x in found["timings"]] == expected
    assert {"one stream", "zarr 1", "zarr 2"} <= set(names)
    assert all(x["seconds"] > 0 for x in found["timings"] + found["samples"])
    assert len(found["samples"]) == len(expected)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    def start(task: BenchTask, on_event: Callable[[Event], None]) -> None:
        (task.workspace / "0").mkdir()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(300)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        bench_directory(BenchOptions(tmp_path, 1_000_000, 2, 1), as_json=True, start=start)

    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.multiprocess
def test_a_rank_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    def start(task: BenchTask, on_event: Callable[[Event], None]) -> None:
        task.workspace.rmdir()
        run_task(task, on_event)
        task.workspace.mkdir()

    with pytest.raises(BenchError) as found:
        bench_directory(BenchOptions(tmp_path, 1_000_000, 2, 1), as_json=True, start=start)

    assert str(found.value).startswith("rank 0: FileNotFoundError: ")
    assert "\n" not in str(found.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiprocess
def test_an_interrupt_leaves_neither_files_nor_processes(tmp_path: Path) -> None:
    place, scratch = tmp_path / "place", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    command = [*COMMAND, str(place), "--size", "0.002", "--repetitions", "1000"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: any(place.rglob("rank*.bin")))
        assert processes_with(f"TMPDIR={scratch}")
        process.send_signal(signal.SIGINT)
        assert process.wait(150) == 130
    finally:
        process.kill()
        process.communicate()

    assert list(place.iterdir()) == []
    assert list(scratch.glob("dist-ckpt*")) == []
    wait_until(lambda: not processes_with(f"TMPDIR={scratch}"))


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_with(variable: str) -> list[str]:
    """Processes that have a variable in their environment, whoever has started them."""
    return [path.name for path in Path("/proc").glob("[0-9]*") if variable in environment_of(path)]


def environment_of(process: Path) -> list[str]:
    try:
        return (process / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended meanwhile
        return []
