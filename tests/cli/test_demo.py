"""The demonstration, end to end at a small size, and how it fails."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dist_ckpt_strategies.cli.demo.main import (
    Agreement,
    StartRecord,
    compare_digests,
    comparison_row,
    run_demo,
    run_task,
)
from dist_ckpt_strategies.cli.demo.task import (
    ModelSize,
    ParallelLayout,
    RankTask,
    Role,
    Training,
)
from dist_ckpt_strategies.cli.demo.worker import digest_tensor
from dist_ckpt_strategies.cli.ranks import Event, RankError, run_rank_processes
from tests.support.demo_ranks import run_task_forked

SMALL = Training(
    size=ModelSize(
        num_layers=2,
        hidden=64,
        num_heads=4,
        num_query_groups=4,
        ffn_hidden=128,
        sequence_length=32,
    ),
    global_batch=8,
    num_before_save=10,
    num_after_save=3,
)

INDIVISIBLE = replace(SMALL, size=replace(SMALL.size, num_heads=3, num_query_groups=3))

# A rank that writes its process id and waits for its parent to end.
WAITING_RANK = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
from dist_ckpt_strategies.cli.ranks import end_with_parent
end_with_parent()
time.sleep(600)
"""

FAILING_RANK = """
import pathlib, sys, time
from dist_ckpt_strategies.cli.ranks import write_failure
while not all((pathlib.Path(sys.argv[1]) / f"pid{r}").exists() for r in (0, 1, 3)):
    time.sleep(0.01)
write_failure(pathlib.Path(sys.argv[1]), 2, ValueError("the disk is full"))
print("line before the end")
sys.exit(1)
"""

# Whoever runs the tests in the background may have had SIGINT ignored, which is inherited.
INTERRUPTED_PARENT = """
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dist_ckpt_strategies.cli.ranks import run_rank_processes
scratch = pathlib.Path(sys.argv[1])
commands = [[sys.executable, "-c", sys.argv[2], str(scratch / f"pid{r}")] for r in range(2)]
try:
    run_rank_processes(commands, scratch, print, 60.0)
except KeyboardInterrupt:
    sys.exit(130)
"""


def waiting_command(scratch: Path, global_rank: int) -> list[str]:
    return [sys.executable, "-c", WAITING_RANK, str(scratch / f"pid{global_rank}")]


def assert_gone(pid_file: Path) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 150
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.02)


def run_captured(keep: Path | None, training: Training) -> tuple[int, str]:
    output = io.StringIO()
    console = Console(file=output, width=200)
    status = run_demo(keep, console, training=training, start=run_task_forked)
    return status, output.getvalue()


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_the_demo_ends_well_and_says_that_everything_is_bit_identical(tmp_path: Path) -> None:
    status, text = run_captured(tmp_path / "kept", SMALL)

    assert status == 0, text
    for layout in ("TP2 x DP2", "TP4 x DP1", "TP1 x DP2 x PP2", "TP1 x DP4"):
        assert layout in text
    # Four loads of weights, master weights and two moments each.
    assert text.count("yes 17/17") == 4 * 4
    assert "NO " not in text
    assert "save locally" in text
    assert "lose the disk of node 1" in text
    assert re.search(r"recover +TP2 x DP2, lost", text)
    assert re.search(r"TP2 x DP2, lost +yes .* yes .* yes .* yes", text)
    assert "Two-stage load: each byte is read once" in text
    assert re.search(r"read from storage +[\d.]+ kB +[\d.]+ kB +[\d.]+ kB +[\d.]+ kB", text)
    assert (tmp_path / "kept" / "metadata.json").exists()
    assert (tmp_path / "kept" / "decoder.layers.mlp.linear_fc2.weight" / ".zarray").exists()


@pytest.mark.multiprocess
def test_a_demo_that_fails_names_the_rank_and_the_reason() -> None:
    status, text = run_captured(None, INDIVISIBLE)

    assert status == 1
    assert "The demonstration failed." in text
    assert "TP2 x DP2: rank " in text
    assert "ValueError: num_attention_heads (3) must be a multiple of" in " ".join(text.split())


def run_in_one_python(scratch: Path) -> StartRecord:
    """Train on one rank, in a Python of its own, as the command starts them."""
    layout = ParallelLayout()
    record = StartRecord(layout)
    task = RankTask(Role.TRAIN, layout, SMALL, scratch / "checkpoint", scratch)
    run_task(task, record.add, 100.0)
    return record


@pytest.mark.multiprocess
def test_a_rank_in_a_python_of_its_own_carries_out_its_task(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    record = run_in_one_python(tmp_path)

    num_iterations = SMALL.num_before_save + SMALL.num_after_save
    assert sorted(record.losses) == list(range(num_iterations))
    assert len(record.digests) == 4 * 17
    assert (tmp_path / "checkpoint" / "metadata.json").exists()


@pytest.mark.multiprocess
def test_a_rank_that_fails_is_reported_with_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0: FileNotFoundError: ") as caught:
        run_in_one_python(tmp_path)

    _, _, output = str(caught.value).partition("the end of its output:")
    assert "FileNotFoundError: " in output, caught.value


def test_a_directory_that_holds_files_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()

    status, text = run_captured(tmp_path, SMALL)

    assert status == 2
    assert "expected a new or empty directory" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


@pytest.mark.multiprocess
def test_a_failing_rank_is_named_and_the_others_are_stopped(tmp_path: Path) -> None:
    commands = [waiting_command(tmp_path, rank) for rank in range(4)]
    commands[2] = [sys.executable, "-c", FAILING_RANK, str(tmp_path)]

    with pytest.raises(RankError, match="rank 2: ValueError: the disk is full") as caught:
        run_rank_processes(commands, tmp_path, print, 50.0)

    assert "line before the end" in str(caught.value)
    for rank in (0, 1, 3):
        assert_gone(tmp_path / f"pid{rank}")


@pytest.mark.multiprocess
def test_a_rank_killed_by_a_signal_is_named_before_those_that_miss_it(tmp_path: Path) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    missing = FAILING_RANK.replace("(0, 1, 3)", "()")
    commands = [[sys.executable, "-c", killed], [sys.executable, "-c", missing, str(tmp_path)]]

    with pytest.raises(RankError, match=r"rank 0 failed \(exit status -9\)"):
        run_rank_processes(commands, tmp_path, print, 50.0)


@pytest.mark.multiprocess
def test_ranks_that_do_not_end_are_stopped_when_the_time_is_up(tmp_path: Path) -> None:
    commands = [waiting_command(tmp_path, 0), [sys.executable, "-c", ""]]

    with pytest.raises(RankError, match=r"rank\(s\) 0 still running, but nothing happened for 4 s"):
        run_rank_processes(commands, tmp_path, print, 4.0)

    assert_gone(tmp_path / "pid0")


@pytest.mark.multiprocess
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(tmp_path: Path, ending: signal.Signals) -> None:
    command = [sys.executable, "-c", INTERRUPTED_PARENT, str(tmp_path), WAITING_RANK]
    with subprocess.Popen(command) as parent:
        wait_for(tmp_path / "pid0", tmp_path / "pid1")
        parent.send_signal(ending)
        status = parent.wait(timeout=150)

    assert status == (130 if ending is signal.SIGINT else -signal.SIGKILL)
    deadline = time.monotonic() + 150
    for rank in (0, 1):
        pid = int((tmp_path / f"pid{rank}").read_text())
        while is_running(pid):
            assert time.monotonic() < deadline, f"rank {rank} is still there"
            time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie, which only its new parent can remove, does not run."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_a_digest_sees_one_bit_the_dtype_and_the_shape() -> None:
    tensor = torch.linspace(-1, 1, 12).to(torch.bfloat16)
    flipped = tensor.clone()
    flipped.view(torch.int16)[5] ^= 1
    others = [flipped, tensor.view(torch.float16), tensor.reshape(3, 4)]

    assert len({digest_tensor(t) for t in [tensor, *others]}) == 4
    assert digest_tensor(torch.stack([tensor, tensor])[:, ::2][0]) == digest_tensor(tensor[::2])


def test_a_changed_a_missing_and_a_new_tensor_all_count_as_differing() -> None:
    before = {"w": "1", "v": "2", "u": "3", "optimizer.state.exp_avg.w": "4"}
    after = {"w": "1", "v": "9", "t": "3", "optimizer.state.exp_avg.w": "4"}

    agreements = compare_digests(before, after)

    assert agreements == (Agreement("weights", 3, ("t", "u", "v")), Agreement("exp_avg", 1, ()))
    assert comparison_row("us", agreements, 0.5).facts == ("NO 0/3", "yes 1/1", "0.5000")


# Half a line first: the parent must not take it for an event.
REPORTING_RANK = """
import json, pathlib, sys, time
with (pathlib.Path(sys.argv[1]) / "events.jsonl").open("a") as file:
    for text in ('{"event": "begun", ', '"name": "save"}\\n', '{"event": "ended"}\\n'):
        print(text, file=file, end="", flush=True)
        time.sleep(0.3)
"""


@pytest.mark.multiprocess
def test_events_are_read_once_and_only_when_complete(tmp_path: Path) -> None:
    found: list[Event] = []
    command = [sys.executable, "-c", REPORTING_RANK, str(tmp_path)]

    run_rank_processes([command], tmp_path, found.append, 50.0)

    assert found == [{"event": "begun", "name": "save"}, {"event": "ended"}]
