"""``--nproc`` of verify, convert and diff, and the same under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.formats.locations import is_finished
from tests.support.checkpoints import RNG, WEIGHT, flip_bit

pytestmark = pytest.mark.multiprocess

COMMAND = (sys.executable, "-m", "dist_ckpt_strategies.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
LIMIT_S = 200


def finished(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return finished(*COMMAND, *args, "--nproc", "2")


def without_seconds(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return {name: value for name, value in found.items() if "second" not in name}


def test_two_processes_report_as_one(written: Path, tmp_path: Path) -> None:
    converted = run("convert", written, tmp_path / "c", "--to", "zarr@2", "--json")
    assert (converted.returncode, converted.stderr) == (0, "")
    assert json.loads(converted.stdout)["num_arrays"] == 4
    for args in (("diff", written, tmp_path / "c"), ("verify", tmp_path / "c")):
        shared = run(*args, "--json")
        alone = CliRunner().invoke(app, [*map(str, args), "--json"])
        assert (shared.returncode, shared.stderr) == (0, "")
        assert without_seconds(shared.stdout) == without_seconds(alone.stdout)


def test_damage_is_reported_once(checkpoint: Path, tmp_path: Path) -> None:
    flip_bit(checkpoint / RNG / "shard_1.1_2.2.pt", b"state")
    verified = run("verify", checkpoint)
    assert (verified.returncode, verified.stderr) == (1, "")
    assert verified.stdout.count("shard_1.1_2.2.pt") == 1

    (checkpoint / WEIGHT / "0.0").unlink()
    converted = run("convert", checkpoint, tmp_path / "c", "--to", "zarr@2")
    assert (converted.returncode, converted.stdout) == (1, "")
    assert converted.stderr.startswith("error: rank ")
    assert converted.stderr.count("\n") == 1
    assert f"{checkpoint}/{WEIGHT}/0.0" in converted.stderr
    assert not is_finished(tmp_path / "c")


def test_the_ranks_of_torchrun_share_the_work(written: Path, checkpoint: Path) -> None:
    verified = finished(*TORCHRUN, COMMAND[-1], "verify", checkpoint, "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["whole"] is True

    flip_bit(checkpoint / RNG / "shard_1.1_2.2.pt", b"state")
    compared = finished(*TORCHRUN, COMMAND[-1], "diff", written, checkpoint)
    assert compared.returncode == 1
    assert compared.stdout == ""
    assert compared.stderr.count("error: rank 0: ") == 1


def test_processes_beside_those_of_torchrun_are_refused(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert CliRunner().invoke(app, ["verify", str(written), "--nproc", "1"]).exit_code == 0
    refused = CliRunner().invoke(app, ["verify", str(written), "--nproc", "2"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "one of 4 ranks already" in refused.stderr


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in {"Z", "X"}


def until(is_so: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S / 4
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_process_is_left_when_the_command_is_ended(
    written: Path, sent: signal.Signals, status: int
) -> None:
    """The other process hangs, which Ctrl-C ends too."""
    command = [*COMMAND, "verify", str(written), "--nproc", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        (child,) = until(lambda: children_of(process.pid))
        if sent is signal.SIGINT:
            time.sleep(2)
            os.kill(child, signal.SIGSTOP)
        os.kill(process.pid, sent)
        _, stderr = process.communicate(timeout=LIMIT_S / 4)

    assert process.returncode == status
    assert stderr == ("interrupted\n" if status == 130 else "")
    until(lambda: not is_running(child))


def test_a_process_that_dies_ends_the_command(written: Path) -> None:
    command = [*COMMAND, "verify", str(written), "--nproc", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        (child,) = until(lambda: children_of(process.pid))
        os.kill(child, signal.SIGKILL)
        _, stderr = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 3
    assert stderr.startswith("error: rank 1: its process ended with status -9")
