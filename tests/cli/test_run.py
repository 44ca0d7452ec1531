"""``dist-ckpt run`` as a command: what it prints, how it ends, and whom it leaves behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.commands import LIMIT_S, PROGRAM, begun
from tests.support.processes import ended, is_running, until

RUN = (*PROGRAM, "run")
START = """
import os, signal, sys, time
from pathlib import Path
here = Path(__file__).parent
(here / f"{os.getpid()}.pid").touch()
"""
PRINTS = "print('out', *sys.argv[1:])\nprint('err', file=sys.stderr)\n"


def script(directory: Path, body: str) -> Path:
    path = directory / "script.py"
    path.write_text(START + body)
    return path


def appeared(directory: Path, count: int) -> list[int]:
    """The workers that have started, by the files that they have made."""
    found = until(lambda: (paths := [*directory.glob("*.pid")]) * (len(paths) == count), LIMIT_S)
    return [int(path.stem) for path in found]


@pytest.mark.multiprocess
def test_lines_come_behind_their_rank_and_the_limit_is_status_1(tmp_path: Path) -> None:
    body = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
print(*map(os.environ.get, names))
print("no end", end="", file=sys.stderr)
sys.exit(9 if os.environ["RANK"] == "0" else 0)
"""
    path = script(tmp_path, PRINTS + body)

    done = ended(*RUN, "-n", "2", "--max-restarts", "1", path, "--nproc", "7")

    assert done.returncode == 1
    assert "[0] out --nproc 7\n" in done.stdout
    assert "[0] err\n" in done.stderr
    assert "[1] 1 1 2 2 none\n" in done.stdout
    assert "[1] no end\n" in done.stderr
    assert "dist-ckpt: rank 0 is gone: exit code 9; a new process takes its place" in done.stderr
    assert "error: 2 workers have died (rank 0 2x), 1 restarts are allowed" in done.stderr


@pytest.mark.multiprocess
def test_no_worker_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with begun(*RUN, "-n", "2", script(tmp_path, "time.sleep(300)")) as process:
        pids = appeared(tmp_path, 2)
        process.kill()
        assert process.wait(LIMIT_S) == -signal.SIGKILL

    until(lambda: not any(map(is_running, pids)))


@pytest.mark.multiprocess
@pytest.mark.parametrize("redirection", [">/dev/full", ">&- 2>&-"])
def test_no_job_ends_for_a_line_that_cannot_be_written(redirection: str, tmp_path: Path) -> None:
    path = script(tmp_path, PRINTS + "(here / 'ran').touch()")

    shell = ("/bin/sh", "-c", f'"$@" {redirection}', "sh")
    done = ended(*shell, *RUN, "-n", "1", path)

    assert done.returncode == 0
    assert (tmp_path / "ran").exists()
    assert "unexpected" not in done.stderr


@pytest.mark.multiprocess
def test_a_reader_that_goes_ends_the_job_with_all_that_it_started(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n(here / f'{os.getpid()}.pid').touch()\n"
        "while not (here / 'go').exists() or child == 0 or not print('line'): time.sleep(0.01)",
    )
    with begun(*RUN, "-n", "2", path) as process:
        pids = appeared(tmp_path, 4)
        assert process.stdout is not None
        process.stdout.close()
        (tmp_path / "go").touch()
        assert process.wait(LIMIT_S) == 1

    until(lambda: not any(map(is_running, pids)))


@pytest.mark.multiprocess
def test_under_nohup_a_job_outlives_its_terminal(tmp_path: Path) -> None:
    path = script(tmp_path, "while not (here / 'go').exists(): time.sleep(0.01)")
    nohup = ("/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    with begun(*nohup, *RUN, "-n", "2", path) as process:
        appeared(tmp_path, 2)
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        _, said = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0
    assert "SIGHUP" not in said
