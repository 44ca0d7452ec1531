"""Scripts under torchrun; and how a process ends after an attempt: by its own code."""

import re
import sys
from pathlib import Path

import pytest

from dist_ckpt_strategies.comm.job_store import host_store
from tests.cli.commands import begun
from tests.inprocess.agents import VARIABLES, Agents
from tests.support.processes import finished
from tests.support.restarts import HOST

pytestmark = pytest.mark.multiprocess

SURVIVES = """
import os, sys
import torch, torch.distributed as dist
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper
from dist_ckpt_strategies.inprocess.train_utils import wait_rank

wait_rank()
started = os.environ["TORCHELASTIC_RESTART_COUNT"]

@HPWrapper()
def block(call: HPCallWrapper):
    dist.init_process_group("interruptible_gloo")
    if call.num_attempts == 1 and dist.get_rank() == 1:
        raise ValueError("on purpose")
    total = torch.ones(1)
    dist.all_reduce(total)
    if started == "0" and dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
    return call.num_attempts, int(total)

num_attempts, total = block()
# In one write: torchrun starts Python with -u, and then the parts of a print mix with others'.
sys.stdout.write(f"done {started} {num_attempts} {total}\\n")
"""


def test_an_exception_is_survived_in_place_and_a_death_by_a_start_of_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SURVIVES)
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "train.py")

    done = finished(
        *(sys.executable, "-m", "torch.distributed.run", *options),
        cwd=tmp_path,
        variables=VARIABLES,
    )

    assert re.findall(r"done .*", done.stdout) == ["done 1 2 2"] * 2


LEAVES = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper

@HPWrapper(max_attempts=3)
def block(call: HPCallWrapper):
    dist.init_process_group("interruptible_gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(1000):
        model(torch.ones(2, 8)).sum().backward()
        dist.all_reduce(torch.ones(2_000_000))
        if step == 2 and dist.get_rank() == 1:
            sys.exit(3) if call.num_attempts == 3 else [][1]

try:
    block()
except RestartError as error:
    print(error, file=sys.stderr)
    sys.exit(7)
"""


def test_a_process_that_leaves_the_block_says_why_and_keeps_its_exit_code() -> None:
    host = host_store()
    torchrun = VARIABLES | {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(host.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        begun(sys.executable, "-c", LEAVES, **torchrun, RANK=rank, LOCAL_RANK=rank)
        for rank in ("0", "1")
    ]
    try:
        texts = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

    assert [rank.returncode for rank in ranks] == [7, 3], texts
    assert "rank 1: exception in restart round 3: SystemExit: 3" in texts[0]
    assert not any("terminate called" in text for text in texts), texts


NO_THREADS = """
start = threading.Thread.start
def no_threads(thread):
    if thread.name == "dist_ckpt-abort":
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = no_threads
@HPWrapper()
def block(): raise ValueError("on purpose")
"""
SWALLOWS = """
@HPWrapper(progress_timeout_s=1, abort_timeout=2)
def block():
    while True:
        try: time.sleep(60)
        except BaseException: pass
"""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (NO_THREADS, r"stopping the block failed: this process ends(?s:.*)can't start new thread"),
        (SWALLOWS, "the block has not been left within 2 s: this process ends"),
    ],
)
def test_a_process_that_cannot_stop_its_block_ends_and_says_why(
    body: str, why: str, agents: Agents
) -> None:
    head = "import threading\nfrom dist_ckpt_strategies.inprocess import HPWrapper\n"
    _, text = agents.run(f"{head}{body}\nblock()", "--nproc", "1", "--max-restarts", "0")

    assert "rank 0: exit code 86" in text
    assert re.search(why, text)
