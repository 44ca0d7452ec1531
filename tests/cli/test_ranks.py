"""Rank processes: their results and failures, and that none is left; ``--nproc`` and torchrun."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.commands import PROGRAM, begun, json_of, run
from tests.support.checkpoints import RNG, flip_at, flip_bit, write_array
from tests.support.processes import ended, is_running, until

pytestmark = pytest.mark.multiprocess

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *PROGRAM[1:])


def shared(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return ended(*PROGRAM, *args, "--nproc", "2")


def without_seconds(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if "second" not in name}


@pytest.fixture
def large(checkpoint: Path) -> Path:
    """A checkpoint with an array of several blocks."""
    values = np.arange(300 * 200, dtype=np.float32).reshape(300, 200)
    write_array(checkpoint, values, key="large", chunk=(128, 200))
    return checkpoint


def test_two_processes_report_as_one(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "c"
    converted = shared("convert", large, target, "--to", "pack", "--memory", "1", "--json")
    assert (converted.returncode, converted.stderr) == (0, "")
    assert json.loads(converted.stdout)["num_arrays"] == 5

    packs = sorted(target.glob("packs/*/*"))
    for path in (*packs, target / "common.pt"):
        flip_at(path, 70)
    by_two, by_one = shared("verify", target, "--json"), json_of("verify", target, code=1)
    assert (by_two.returncode, by_two.stderr) == (1, "")
    assert without_seconds(json.loads(by_two.stdout)) == without_seconds(by_one)
    assert len(by_one["issues"]) == len(packs) + 1 > 2


def test_a_failure_is_reported_once(large: Path, tmp_path: Path) -> None:
    cannot_write = ("/bin/sh", "-c", 'ulimit -f 100; exec "$@"', "sh")
    convert = (*PROGRAM, "convert", large, tmp_path / "c", "--to", "pack", "--nproc", "2")
    converted = ended(*cannot_write, *convert)

    assert (converted.returncode, converted.stdout) == (3, "")
    assert re.match(rf"error: rank \d: .*{tmp_path}/c/.*\n\Z", converted.stderr)
    assert not (tmp_path / "c" / "metadata.json").exists()


def test_the_ranks_of_torchrun_share_the_work(written: Path, checkpoint: Path) -> None:
    flip_bit(checkpoint / RNG / "shard_1.1_2.2.pt", b"state")
    compared = ended(*TORCHRUN, "diff", written, checkpoint)
    assert compared.returncode == 1
    assert compared.stdout.count(": damaged in the second: ") == 1
    assert "error: rank" not in compared.stderr


def test_processes_beside_those_of_torchrun_are_refused(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert run("verify", written, "--nproc", "1").exit_code == 0
    refused = run("verify", written, "--nproc", "2")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "one of 4 ranks already" in refused.stderr


def ranks_of(pid: int) -> list[int]:
    """The processes of both ranks of a command, once each runs its own program."""
    found = [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    programs = [Path(f"/proc/{child}/cmdline").read_bytes() for child in found]
    return found * (len([one for one in programs if b"cli.ranks" in one]) == 2)


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGKILL, -9, ""),
        (None, 3, "error: rank 1"),
    ],
)
def test_no_process_is_left_when_the_command_or_one_of_its_ranks_is_ended(
    written: Path, tmp_path: Path, sent: signal.Signals | None, status: int, said: str
) -> None:
    """One of the processes hangs, so none has ended by then; Ctrl-C ends it too."""
    command = (*PROGRAM, "verify", written, "--nproc", "2")
    with begun(*command, TMPDIR=str(tmp_path)) as process:
        children = until(lambda: ranks_of(process.pid))
        os.kill(children[1], signal.SIGSTOP if sent else signal.SIGKILL)
        if sent:
            time.sleep(2)
            os.kill(process.pid, sent)
        if sent is signal.SIGKILL:
            os.kill(children[1], signal.SIGCONT)
        _, stderr = process.communicate(timeout=100)

    assert process.returncode == status
    assert stderr.startswith(said)
    assert stderr.count("\n") == bool(said)
    until(lambda: not any(map(is_running, children)))
    assert sent is signal.SIGKILL or not list(tmp_path.iterdir())
