"""How long the package takes to import, and the command to answer, each in a new process.

    python benchmarks/startup.py --out startup.jsonl
    python benchmarks/startup.py --smoke

Wall-clock time from the start of the process to its end, Python's own start included, which is
measured beside it. Rounds take turns, the first does not count: files are in the page cache. The
checkpoints have one small array to a key, saved by one rank, as many files as arrays.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.common.command_line import (
    NOWHERE,
    ROOT,
    Directory,
    Out,
    Repetitions,
    Smoke,
    open_output,
)
from benchmarks.common.disks import workspace
from benchmarks.common.processes import quiet_imports

_NUM_ARRAYS = 10_000
_NUM_SMOKE_ARRAYS = 20
_COMMAND = (sys.executable, "-m", "dist_ckpt_strategies.cli")


def commands(directory: Path) -> dict[str, tuple[str, ...]]:
    """What is timed, by its name in tables: Python's own start first."""
    return {
        "python": (sys.executable, "-c", "pass"),
        "import dist_ckpt_strategies": (sys.executable, "-c", "import dist_ckpt_strategies"),
        "dist-ckpt --help": (*_COMMAND, "--help"),
        **{
            f"dist-ckpt inspect, format {version}": (
                *(*_COMMAND, "inspect"),
                str(directory / f"format{version}"),
            )
            for version in (1, 2)
        },
    }


def write_checkpoints(directory: Path, num_arrays: int) -> None:
    """Save as many arrays in each format."""
    with quiet_imports():
        import torch  # noqa: PLC0415 - only this process needs it
        from megatron.core.dist_checkpointing import ShardedTensor  # noqa: PLC0415

        import dist_ckpt_strategies  # noqa: PLC0415

    state = {
        name: ShardedTensor.from_rank_offsets(name, torch.full((4, 8), float(number)))
        for number in range(num_arrays)
        for name in [f"decoder.layers.{number // 20}.part{number % 20:02}.weight"]
    }
    for version in (1, 2):
        place = directory / f"format{version}"
        place.mkdir()
        dist_ckpt_strategies.save(state, place, ("zarr", version))


def timed_s(command: tuple[str, ...]) -> float:
    """How long a command takes, in seconds.

    Raises:
        CalledProcessError: it failed.
    """
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.perf_counter()
    subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=300,
        check=True,
    )
    return time.perf_counter() - began


def main(
    *,
    directory: Directory = None,
    repetitions: Repetitions = 7,
    out: Out = NOWHERE,
    smoke: Smoke = False,
) -> None:
    """Time the start of the package and of its command."""
    num_arrays = _NUM_SMOKE_ARRAYS if smoke else _NUM_ARRAYS
    with open_output(out, "startup.py") as output, workspace(directory) as place:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(write_checkpoints, place, num_arrays).result()
        seconds: dict[str, list[float]] = {}
        for number in range(1 + (1 if smoke else repetitions)):
            for name, command in commands(place).items():
                found = timed_s(command)
                if number:  # the first round fills the page cache
                    output.write("sample", {"name": name, "seconds": found})
                    seconds.setdefault(name, []).append(found)
        for name, all_ in seconds.items():
            least, median, most = min(all_), statistics.median(all_), max(all_)
            summary = {"name": name, "median": median, "least": least, "most": most}
            output.write("summary", summary, case={"num_arrays": num_arrays})


if __name__ == "__main__":
    typer.run(main)
