"""A supervised job of one node: workers are replaced or end the job, and none is left behind."""

import json
import os
import re
import signal
import time
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]
import pytest

from tests.inprocess.agents import LIMIT_S, Agents
from tests.support.processes import is_running, until

pytestmark = pytest.mark.multiprocess

BEATS = """
from dist_ckpt_strategies.inprocess.launch import launch_from_environment
from dist_ckpt_strategies.inprocess.worker_process import start_heartbeat
start_heartbeat(launch_from_environment())
"""


def test_a_spare_that_is_still_starting_takes_over_before_a_new_process_could(
    agents: Agents,
) -> None:
    body = """
if rank is None:
    was_there_before = is_first("spare")
    Path("starting").touch()
    wait_for("dead")
    time.sleep(0.5)
    from dist_ckpt_strategies.inprocess.train_utils import wait_rank
    if not was_there_before:
        time.sleep(120)
    wait_rank()
    print("now", os.environ["RANK"])
    Path("taken").touch()
elif rank == "1":
    wait_for("starting")
    Path("dead").touch()
    os.kill(os.getpid(), signal.SIGKILL)
else:
    wait_for("taken")
"""
    code, text = agents.run(body, "--nproc", "2", "--spares", "1")

    assert code == 0
    assert "spare worker2" in text
    assert re.findall(r".*now.*", text) == ["[1] now 1"]


@pytest.mark.parametrize(
    ("act", "mode", "why"),
    [
        ("os._exit(0)", "death", "exit code 0 in the middle of the wrapped block"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "hang", "no heartbeat for 5 s"),
    ],
)
def test_a_worker_that_dies_or_hangs_in_a_block_is_replaced_with_its_children_and_others_stay(
    agents: Agents, act: str, mode: str, why: str
) -> None:
    body = f"""
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper

@HPWrapper()
def block(call: HPCallWrapper):
    if rank == "1" and is_first("fault"):
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            Path(f"child.{{os.getpid()}}").touch()
            time.sleep(600)
        wait_for(f"child.{{child}}")
        {act}
    if rank == "0" and call.num_attempts == 1:
        time.sleep(600)
    return call.last_fault

print(block())
"""
    code, text = agents.run(body, "--nproc", "2", "--heartbeat-timeout", "5")

    assert code == 0
    assert f"rank 1 is gone: {why}" in text
    assert f"[0] rank 1: {mode} in restart round 1: {why}\n" in text
    assert [len(agents.pids(name)) for name in ("rank0", "rank1", "child")] == [1, 2, 1]


def test_a_worker_that_computes_or_ends_for_longer_than_the_limit_is_not_hung(
    agents: Agents,
) -> None:
    computes = """
import atexit, hashlib
atexit.register(time.sleep, 4.0)
end = time.monotonic() + 4.0
while time.monotonic() < end: hashlib.sha256(b"x" * 1000).digest()
"""
    code, text = agents.run(BEATS + computes, "--nproc", "1", "--heartbeat-timeout", "3")

    assert code == 0
    assert "dist-ckpt:" not in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 89), (signal.SIGKILL, -9)])
def test_a_signal_reaches_the_workers_and_one_that_ignores_it_is_killed_with_its_children(
    number: int, code: int, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the launcher is killed itself, nothing is left either."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")
    body = """
import subprocess
def end(number, frame):
    print("asked by", number, flush=True)
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end if rank == "0" else signal.SIG_IGN)
if rank == "1":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    Path(f"child.{child.pid}").touch()
Path(f"up of {rank}").touch()
time.sleep(600)
"""
    agent = agents.start(body, "--nproc", "2")
    until(lambda: len(list(agents.directory.glob("up*"))) == 2)

    agent.send_signal(number)

    assert agents.code(agent) == code
    assert agents.output(agent).count(f"[0] asked by {number:d}\n") == (code > 0)
    assert len(re.findall("ranks 1 have not ended 3.* are killed", agents.output(agent))) == (
        code > 0
    )
    assert len(agents.pids("child")) == 1
    agents.require_ended()


SAVES_ON_SIGTERM = """
def save(number, frame):
    Path(f"asked {rank}").touch()
    wait_for("go")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
Path(f"up {rank}").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("is_urgent", [False, True])
def test_a_save_after_a_signal_has_its_time_until_a_second_one(
    is_urgent: bool, agents: Agents
) -> None:
    agent = agents.start(SAVES_ON_SIGTERM, "--nproc", "2", "--shutdown_timeout", "100")
    until(lambda: len(list(agents.directory.glob("up *"))) == 2)
    agent.terminate()
    until(lambda: len(list(agents.directory.glob("asked *"))) == 2)

    time.sleep(6.0)
    assert agent.poll() is None
    if is_urgent:
        agent.terminate()
    else:
        agents.go()

    assert agents.code(agent) == (89 if is_urgent else 143)
    agents.require_ended()
    assert ("ranks 0, 1 have not ended" in agents.output(agent)) == is_urgent


PREEMPTED = """
from datetime import timedelta
import torch, torch.distributed as dist
from dist_ckpt_strategies import SavePolicy, TieredCheckpointManager
from dist_ckpt_strategies.inprocess import HPWrapper
@HPWrapper()
def train():
    dist.init_process_group("interruptible_gloo", timeout=timedelta(seconds=100))
    manager = TieredCheckpointManager("root", policy=SavePolicy(every_steps=10**6))
    with manager:
        step = 0
        while True:
            step += 1
            manager.save(step, {"step": step})
            Path(f"trains {rank}").touch()
            time.sleep(0.05)
train()
"""


@pytest.mark.parametrize("receivers", ["worker", "all"])
def test_ranks_that_saved_and_left_are_no_deaths_and_end_the_job(
    receivers: str, agents: Agents
) -> None:
    agent = agents.start(PREEMPTED, "--nproc", "2", "--max-restarts", "0")
    until(lambda: len(list(agents.directory.glob("trains *"))) == 2)

    everybody = [*agents.pids(), agent.pid]
    for pid in agents.pids("rank1") if receivers == "worker" else everybody:
        os.kill(pid, signal.SIGTERM)

    assert agents.code(agent) == 143, agents.output(agent)
    assert len(list(agents.directory.glob("root/*/metadata.json"))) == 1
    assert [len(agents.pids(f"rank{rank}")) for rank in range(2)] == [1, 1]


def test_a_job_that_does_no_step_ends_although_its_processes_are_replaced(agents: Agents) -> None:
    body = """
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper
@HPWrapper(max_idle_attempts=2)
def train(call: HPCallWrapper):
    Path(f"attempt of {rank}: {os.getpid()} {call.num_attempts}").touch()
    if rank == "1":
        raise RuntimeError("no route to host")
    time.sleep(600)
train()
"""
    code, text = agents.run(body, "--nproc", "2")

    assert code == 1
    assert re.search("error: 4 attempts in a row .* no route to host", text)
    assert len(list(agents.directory.glob("attempt of 1*"))) == 4
    assert len(agents.pids("rank1")) == 2


SECOND_BLOCK = """
from dist_ckpt_strategies.inprocess import HPWrapper
@HPWrapper()
def first():
    if rank == "0" and is_first("dies"): os.kill(os.getpid(), signal.SIGKILL)
@HPWrapper()
def second():
    if rank == "1": os.kill(os.getpid(), signal.SIGKILL)
first()
second()
"""
LAST_DEATH = (
    r"(?s)(?=.*NO_OTHER_FAILURES.* rank +: 1 )"
    r"(?=.*rank 1 died after a wrapped block had ended [^\n]*SIGKILL)"
)
"""A new process would begin with the first one, beside others in the second; a death before, which
the job has survived, is no cause."""

OWN_GROUPS = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if rank == "1":
    os._exit(3)
wait_for("never")
"""
DYING_SPARE = """
if rank is None:
    if is_first("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    Path("waits").touch()
    time.sleep(600)
wait_for("waits")
"""
HANGING_CHECK = """
from dist_ckpt_strategies.inprocess import HPWrapper
def check(state, error):
    if rank == "1" and is_first("hangs"):
        time.sleep(600)
@HPWrapper(health_check=check, barrier_timeout_s=60)
def train():
    if rank == "0" and is_first("fails"):
        raise RuntimeError("no route to host")
train()
"""
NEEDS_A_RANK = """
Path(f"came of {rank}").touch()
os.environ["RANK"]
wait_for("came of None")
time.sleep(2.0)
"""
SPARE = ("--spares", "1", "--max-restarts", "0")
NO_NAME = ("--rdzv-endpoint", "no-such-host.invalid:9", "--node-wait", "1")
NO_STORE = ("--rdzv-endpoint", "192.0.2.1:9", "--node-wait", "1", "--node-ttl", "2")
"""An address of documentation: no machine has it."""


@pytest.mark.parametrize(
    ("body", "options", "code", "words"),
    [
        (SECOND_BLOCK, ["-n", "2"], 1, LAST_DEATH),
        (OWN_GROUPS, ["-n", "2"], 1, "rank 1 died: exit code 3; .*with torchrun"),
        (DYING_SPARE, ["--spares", "1"], 0, "a spare is gone: killed by SIGKILL; a new process"),
        (
            HANGING_CHECK,
            ["-n", "2", "--max-restarts", "1"],
            0,
            "(?s)health check has not returned within 30 s.* rank 1 is gone: .*exit code 86",
        ),
        (NEEDS_A_RANK, SPARE, 0, r"ended without waiting in wait_rank\(\); it is no spare"),
        ("", ["--nnodes", "2", *NO_NAME], 87, r"\A(.*pynvml.*\n)*dist-ckpt: .*no-such-host.*not"),
        ("", ["--nnodes", "2", *NO_STORE], 87, r"192\.0\.2\.1.* has not come within --node-wait"),
    ],
)
def test_a_job_goes_on_or_ends_and_says_why(
    body: str, options: Sequence[str], code: int, words: str, agents: Agents
) -> None:
    found, text = agents.run(body, *options)

    assert found == code
    assert re.search(words, text)


def test_the_error_that_a_worker_recorded_is_in_the_notes_and_in_the_final_report(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
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
    own = agents.directory / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    options = ("--nproc", "2", "--max-restarts", "1", "--event-log-handler", "console")

    code, text = agents.run(body, *options, args=("--lr", "0.1"))

    assert code == 1
    why = "rank 1 is gone: exit code 1: ValueError: no such token; a new process takes its place"
    assert why in text
    assert re.search(r"rank 1 2x.*1 restart.*rank 1: exit code 1: ValueError: no such tok", text)
    assert "script.py --lr 0.1 FAILED" in text
    assert 'raise ValueError("no such token")' in text
    assert json.loads(own.read_text())["message"]["message"] == "ValueError: no such token"
    assert re.findall(r'"source": "(\w+)"', text) == ["WORKER", "WORKER", "AGENT"]


WRITES_FOR_EVER = "while True: print('x' * 4000, flush=True)"


def test_a_reader_that_does_not_read_holds_up_neither_a_replacement_nor_a_signal(
    agents: Agents,
) -> None:
    agent = agents.start(WRITES_FOR_EVER, "--nproc", "1", has_pipe=True)
    worker = agents.worker("rank0")
    time.sleep(1.0)  # the pipe is full

    os.kill(worker, signal.SIGKILL)

    until(lambda: len(agents.pids("rank0")) > 1, 60.0)
    assert agent.stdout is not None
    assert any("lines lost: this output was not read" in line for line in agent.stdout)
    time.sleep(1.0)  # it is full again

    agent.send_signal(signal.SIGTERM)

    until(lambda: agent.poll() is not None, 60.0)
    assert agent.returncode == 128 + signal.SIGTERM


def test_a_slow_reader_does_not_hide_a_worker_that_hangs(agents: Agents) -> None:
    body = f"{BEATS}if rank == '1': os.kill(os.getpid(), signal.SIGSTOP)\n{WRITES_FOR_EVER}"
    options = ("--nproc", "2", "--heartbeat-timeout", "3", "--max-restarts", "0")
    agent = agents.start(body, *options, has_pipe=True)
    assert agent.stdout is not None
    assert agent.stderr is not None
    deadline = time.monotonic() + LIMIT_S

    while agent.poll() is None and time.monotonic() < deadline:
        agent.stdout.read(4000)
        time.sleep(0.2)

    agent.kill()
    assert "rank 1: no heartbeat for 3 s" in agent.stderr.read()


def test_a_job_whose_guard_is_killed_ends_and_says_so(agents: Agents) -> None:
    agent = agents.start("wait_for('never')", "--nproc", "1", "--rdzv-endpoint", agents.endpoint)
    worker = agents.worker("rank0")

    children = psutil.Process(agent.pid).children()
    guard = next(c for c in children if any("node_guard" in argument for argument in c.cmdline()))
    guard.kill()

    assert agents.code(agent) == 88
    assert not is_running(worker)
    assert "the guard of this node's workers is gone" in agents.output(agent)
