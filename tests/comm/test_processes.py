"""Which processes of this host have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dist_ckpt_strategies.comm.attendance import has_ended, host_name, process_name

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    code = (
        "from dist_ckpt_strategies.comm.attendance import process_name\nimport os\n"
        "print(process_name(os.getpid()), flush=True)\n"
        "input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


def test_a_process_that_runs_has_not_ended(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    name = child.stdout.readline().strip()

    assert name != process_name(os.getpid())
    assert not has_ended(name)
    assert not has_ended(process_name(os.getpid()))


def test_a_process_has_ended_before_its_parent_has_asked_for_it(
    child: subprocess.Popen[str],
) -> None:
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(name)

    child.wait()
    assert has_ended(name)


def test_a_later_process_with_the_number_is_another_one() -> None:
    assert has_ended(f"{host_name()} {os.getpid()} 1")


@pytest.mark.parametrize("name", ["", "elsewhere 1 1", f"{host_name()}", f"{host_name()} 7"])
def test_what_is_not_known_here_has_not_ended(name: str) -> None:
    assert not has_ended(name)
