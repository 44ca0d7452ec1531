"""A supervised job: dead workers are replaced, others stay, no process is left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from dist_ckpt_strategies.errors import RestartError, RestartLimitError
from dist_ckpt_strategies.inprocess.supervisor import Job, Supervisor, script_command
from tests.support.processes import is_running, until

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
BEATS = """
from dist_ckpt_strategies.config import launch_from_environment
from dist_ckpt_strategies.inprocess.worker_process import start_heartbeat
start_heartbeat(launch_from_environment())
"""
START = """
import os, signal, sys, time
from pathlib import Path
rank, here = os.environ.get("RANK"), Path(__file__).parent
def is_first(what):
    mark = here / f"{what}.{rank}"
    found = mark.exists()
    mark.touch()
    return not found
def wait_for(name, limit_s=120):
    end = time.monotonic() + limit_s
    while not (here / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)
(here / f"pid.{os.getpid()}").touch()
"""


class Heard:
    """What a job has said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self.notes: list[str] = []

    def line(self, who: str, stream: str, line: bytes) -> None:
        self.lines.append((who, stream, line.decode()))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def of(self, who: str) -> list[str]:
        """To its standard output."""
        return [text for found, stream, text in self.lines if (found, stream) == (who, "stdout")]


class Jobs:
    """Jobs of one script in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.heard = Heard()

    def run(self, body: str, num_ranks: int, **options: float) -> int:
        script = self.directory / "script.py"
        script.write_text(START + body)
        command = script_command(str(script), ("--lr", "0.1"), is_module=False)
        fields = {"heartbeat_timeout_s": 0.0, "grace_s": 2.0, **options}
        job = Job(command, num_ranks, **fields)  # type: ignore[arg-type]
        # Each connection to a TCPStore asks for the name of an address: five seconds where the
        # name server does not answer.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RES_OPTIONS": "attempts:0"}
        return Supervisor(job, environment, self.heard.line, self.heard.note).run()

    def pids(self) -> list[int]:
        return [int(path.suffix[1:]) for path in self.directory.glob("pid.*")]

    def require_ended(self) -> None:
        """A moment after they were killed."""
        until(lambda: not any(map(is_running, self.pids())))


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def test_each_worker_knows_its_place_and_the_job_ends_with_the_last(jobs: Jobs) -> None:
    status = jobs.run(
        "names = ('LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'TORCHELASTIC_USE_AGENT_STORE')\n"
        "print(*(os.environ[n] for n in names), *sys.argv[1:])\n"
        "print('no end', end='', file=sys.stderr)",
        2,
    )

    assert status == 0
    for rank in ("0", "1"):
        assert sorted(line for line in jobs.heard.lines if line[0] == rank) == [
            (rank, "stderr", "no end\n"),
            (rank, "stdout", f"{rank} 2 2 True --lr 0.1\n"),
        ]


def test_a_spare_that_is_still_starting_takes_over_before_a_new_process_could(jobs: Jobs) -> None:
    body = """
if rank is None:
    was_there_before = is_first("spare")
    (here / "starting").touch()
    wait_for("dead")
    time.sleep(0.5)
    from dist_ckpt_strategies.inprocess.train_utils import wait_rank
    if not was_there_before:
        time.sleep(120)
    wait_rank()
    print("now", os.environ["RANK"])
    (here / "taken").touch()
elif rank == "1":
    wait_for("starting")
    (here / "dead").touch()
    os.kill(os.getpid(), signal.SIGKILL)
else:
    wait_for("taken")
"""
    assert jobs.run(body, 2, num_spares=1) == 0
    assert "spare worker2" in jobs.heard.notes[0]
    assert jobs.heard.of("1") == ["now 1\n"]
    jobs.require_ended()


@pytest.mark.parametrize(
    ("death", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_a_worker_that_dies_is_replaced_the_others_stay_and_its_children_go(
    jobs: Jobs, death: str, why: str
) -> None:
    body = f"""
if rank == "1" and is_first("death"):
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        (here / f"pid.{{os.getpid()}}").touch()
        time.sleep(600)
    wait_for(f"pid.{{child}}")
    {death}
print("pid", os.getpid())
(here / "again").touch() if rank == "1" else wait_for("again")
"""
    assert jobs.run(body, 2) == 0
    assert [note for note in jobs.heard.notes if why in note and "rank 1" in note]
    assert len(jobs.pids()) == 4
    assert len(jobs.heard.of("0")) == 1
    jobs.require_ended()


def test_a_stopped_worker_is_killed_as_hung_and_replaced(jobs: Jobs) -> None:
    status = jobs.run(
        BEATS + "if rank == '0' and is_first('stop'): os.kill(os.getpid(), signal.SIGSTOP)",
        1,
        heartbeat_timeout_s=1.0,
    )

    assert status == 0
    assert "no heartbeat for 1 s" in jobs.heard.notes[0]


def test_a_worker_that_computes_or_ends_for_longer_than_the_limit_is_not_hung(jobs: Jobs) -> None:
    status = jobs.run(
        BEATS
        + "import atexit\natexit.register(time.sleep, 2.0)\n"
        + "import hashlib\nend = time.monotonic() + 2.0\n"
        + "while time.monotonic() < end: hashlib.sha256(b'x' * 1000).digest()",
        1,
        heartbeat_timeout_s=1.5,
    )

    assert (status, jobs.heard.notes) == (0, [])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_workers_and_one_that_ignores_it_is_killed_with_its_children(
    number: int, status: int, jobs: Jobs
) -> None:
    body = f"""
import subprocess
def end(number, frame):
    print("told", flush=True)
    sys.exit(0)
signal.signal({int(number)}, end if rank == "0" else signal.SIG_IGN)
if rank == "1":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    (here / f"pid.{{child.pid}}").touch()
(here / f"up.{{rank}}").touch()
time.sleep(60)
"""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: len(list(jobs.directory.glob("up.*"))) == 2)
        signal.pthread_kill(main, number)

    interrupter = threading.Thread(target=interrupt, daemon=True)
    interrupter.start()
    found = jobs.run(body, 2, grace_s=5.0)
    interrupter.join()

    assert found == status
    assert jobs.heard.of("0") == ["told\n"]
    assert len(jobs.pids()) == 3
    jobs.require_ended()


@pytest.mark.parametrize(
    ("death", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("os._exit(0)", "exit code 0 in the middle of the wrapped block"),
    ],
)
def test_a_death_counts_against_the_epoch_that_the_worker_had_joined(
    jobs: Jobs, death: str, why: str
) -> None:
    body = f"""
from dist_ckpt_strategies.inprocess.store_coordinator import coordinator_from_environment
me = coordinator_from_environment()
epoch = me.barrier(120)
if rank == "1" and is_first("death"): {death}
if epoch == 1:
    print(me.wait_fault(1, 120))
    epoch = me.barrier(120)
print(epoch, me.finish(epoch, 120), os.environ["MASTER_PORT"])
"""
    status = jobs.run(body, 2)

    assert status == 0
    first, second = jobs.heard.of("0")
    assert first == f"rank 1: death in epoch 1: {why}\n"
    assert second.startswith("2 True ")
    assert jobs.heard.of("1") == [second]


def test_a_death_after_the_end_of_the_block_ends_the_job(jobs: Jobs) -> None:
    body = """
from dist_ckpt_strategies.inprocess.store_coordinator import coordinator_from_environment
me = coordinator_from_environment()
assert me.finish(me.barrier(120), 120)
sys.exit(5)
"""
    with pytest.raises(RestartError, match=r"rank 0 died after a wrapped block.*exit code 5"):
        jobs.run(body, 1)


def test_a_spare_that_dies_while_it_waits_is_replaced_and_named(jobs: Jobs) -> None:
    body = """
if rank is None:
    if is_first("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    (here / "waits").touch()
    time.sleep(600)
wait_for("waits")
"""
    assert jobs.run(body, 1, num_spares=1) == 0
    assert jobs.heard.notes == [
        "a spare is gone: killed by SIGKILL; a new process waits in its place"
    ]
    jobs.require_ended()


def test_a_script_that_fails_without_a_rank_has_no_spares_and_continues(jobs: Jobs) -> None:
    body = """
(here / f"came.{rank}").touch()
os.environ["RANK"]
wait_for("came.None")
time.sleep(2.0)
"""
    assert jobs.run(body, 1, num_spares=1, max_restarts=0) == 0
    assert jobs.heard.notes == ["a spare has ended without waiting in wait_rank(); it is no spare"]


def test_what_a_worker_has_recorded_is_in_the_notes_and_in_the_report_at_the_end(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if rank == "1":
        raise ValueError("no such token")
    wait_for("never")
main()
"""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "own.json"))
    recorded = BufferingHandler(100)
    monkeypatch.setattr(logging.getLogger("torchelastic-events-null"), "handlers", [recorded])

    with pytest.raises(
        RestartLimitError,
        match=r"rank 1 2x.*1 restart.*rank 1: exit code 1: ValueError: no such token",
    ):
        jobs.run(body, 2, max_restarts=1)

    why = "rank 1 is gone: exit code 1: ValueError: no such token; a new process takes its place"
    assert why in jobs.heard.notes
    report = "\n".join(jobs.heard.notes)
    assert "script.py --lr 0.1 FAILED" in report
    assert 'raise ValueError("no such token")' in report
    own = json.loads((tmp_path / "own.json").read_text())
    assert own["message"]["message"] == "ValueError: no such token"
    sources = [json.loads(record.getMessage())["source"] for record in recorded.buffer]
    assert sources == ["WORKER", "WORKER", "AGENT"]
    jobs.require_ended()


def test_a_script_that_makes_groups_outside_of_the_wrapper_is_not_continued(jobs: Jobs) -> None:
    body = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if rank == "1":
    os._exit(3)
wait_for("never")
"""
    with pytest.raises(RestartError, match=r"rank 1 died: exit code 3; .*with torchrun"):
        jobs.run(body, 2)

    jobs.require_ended()
