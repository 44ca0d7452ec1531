"""Processes that a test has started, and waiting for what they do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

_ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = f"{Path(__file__).with_name('quick_start')}{os.pathsep}{_ROOT}"
"""Of what a test starts."""

_T = TypeVar("_T")


def until(is_so: Callable[[], _T], limit_s: float = 300.0) -> _T:
    """The first result of a function that is true; fails after the limit."""
    deadline = time.monotonic() + limit_s
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def ended(
    *command: str | Path,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    limit_s: float = 550.0,
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with these variables in its environment.

    After the limit it is killed with all that it has started.
    """
    with subprocess.Popen(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except BaseException:
            # It imports torch, and the process that hands out the tests does without.
            from dist_ckpt_strategies.inprocess.node_guard import kill_session  # noqa: PLC0415

            kill_session(process.pid)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def finished(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended with status 0; see ``ended``."""
    done = ended(*command, **options)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done


def run_script(script: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A script that has ended, which finds only what it imports itself, where the script is."""
    variables = {"GLOO_SOCKET_IFNAME": "lo"}
    python = (sys.executable, "-W", "ignore")
    return ended(*python, script, *args, cwd=script.parent, variables=variables)


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    return process_state(pid) not in {"", "Z", "X"}


def is_halted(pid: int) -> bool:
    """Whether no thread of a process runs: each is stopped, or has ended."""
    tasks = Path(f"/proc/{pid}/task").glob("*")
    return all(process_state(f"{pid}/task/{task.name}") in "TZX" for task in tasks)


def process_state(pid: int | str) -> str:
    """The letter that the system has for it; nothing where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
