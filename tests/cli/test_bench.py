"""``dist-ckpt bench``: what it shows, and that it leaves nothing behind."""

import json
import signal
import statistics
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from dist_ckpt_strategies.cli.bench_rank import Target
from tests.cli.commands import PROGRAM, begun, run
from tests.support.processes import ended, until

CANDIDATES = ("one stream", "zarr 1", "packs", "torch_dist")


def test_more_than_fits_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    result = run("bench", tmp_path, "--size", "1e9")

    assert result.exit_code == 3
    assert "of free space, found" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_does_nothing_is_found_out_and_new_tensors_are_copied() -> None:
    wanted = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    held = wanted.clone()
    target = Target({"w": held})
    target.clear()
    with pytest.raises(ValueError, match=r"w: tape loaded other values than were saved"):
        target.check("tape")
    target.accept({"w": wanted, "more": torch.zeros(1)})
    target.check("tape")
    assert torch.equal(held, wanted)


@pytest.mark.multiprocess
def test_two_ranks_measure_every_candidate(tmp_path: Path) -> None:
    done = ended(*PROGRAM, "bench", tmp_path, "--size", "0.002", "--repetitions", "2", "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["command"], found["path"], found["num_ranks"]) == ("bench", str(tmp_path), 2)
    names = [name for name in CANDIDATES if name not in found["lacking"]]
    expected = [(step, name) for step in ("save", "load") for name in names]
    assert [(x["step"], x["candidate"]) for x in found["timings"]] == expected
    for timing in found["timings"]:
        which = timing["step"], timing["candidate"]
        own = [
            x["values"]["seconds"] for x in found["samples"] if (x["step"], x["candidate"]) == which
        ]
        assert len(own) == 2
        assert timing["seconds"] == statistics.median(own) > 0
        assert timing["baseline_ratio"] == 1 or timing["candidate"] != "one stream"
    assert found["nbytes"] == pytest.approx(2_000_000, rel=0.05)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiprocess
def test_a_bench_that_is_ended_leaves_neither_files_nor_processes(tmp_path: Path) -> None:
    place, scratch = tmp_path / "place", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    (place / "mine").touch()
    args = ("bench", place, "--size", "0.002", "--repetitions", "1000")
    process = begun(*PROGRAM, *args, TMPDIR=str(scratch))
    try:
        until(lambda: any(place.rglob("rank*.bin")))
        assert processes_with(f"TMPDIR={scratch}")
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=150)
    finally:
        process.kill()
        process.communicate()

    assert process.returncode == 143, stderr
    assert [path.name for path in place.iterdir()] == ["mine"]
    assert list(scratch.glob("dist-ckpt*")) == []
    until(lambda: not processes_with(f"TMPDIR={scratch}"))


def processes_with(variable: str) -> list[Path]:
    """Processes that have a variable in their environment, however they were started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile
            found += [path] * (variable in path.read_text(errors="replace").split("\0"))
    return found
