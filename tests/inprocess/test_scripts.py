"""Scripts under torchrun; and how a process ends after an attempt: by its own code."""

import re
import sys

import pytest

from dist_ckpt_strategies.comm.job_store import host_store
from tests.cli.commands import begun
from tests.inprocess.agents import VARIABLES, Agents
from tests.support.restarts import HOST

pytestmark = pytest.mark.multiprocess

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
