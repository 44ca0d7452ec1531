"""Under torchrun itself: exceptions are survived in place, also across its nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import HOST, free_port

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
LIMIT_S = 250

SCRIPT = """
import os, sys
from pathlib import Path
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
    if "die" in sys.argv and started == "0" and dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
    return call.num_attempts, int(total)

num_attempts, total = block()
# In one piece: torchrun starts Python with -u, and then the parts of a print mix with others'.
sys.stdout.write(f"done {started} {num_attempts} {total}\\n")
"""


def torchrun(directory: Path, *options: str) -> list[str]:
    script = directory / "train.py"
    script.write_text(SCRIPT)
    flags, arguments = [o for o in options if o.startswith("-")], options[-1]
    return [sys.executable, "-m", "torch.distributed.run", *flags, str(script), arguments]


def printed(commands: list[list[str]]) -> list[str]:
    """What is printed on standard output by commands that run side by side, and all end with 0."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "RES_OPTIONS": "attempts:0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        texts = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(commands), texts
    return [line for out, _ in texts for line in re.findall(r"done .*", out)]


def test_an_exception_is_survived_in_place_and_a_death_by_a_start_of_all(tmp_path: Path) -> None:
    command = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=1", "die")

    assert printed([command]) == ["done 1 2 2"] * 2


def test_an_exception_on_one_node_is_survived_in_place_on_all(tmp_path: Path) -> None:
    rendezvous = (f"--master-addr={HOST}", f"--master-port={free_port()}")
    place = ("--nnodes=2", "--nproc-per-node=1", *rendezvous)

    commands = [torchrun(tmp_path, *place, f"--node-rank={node}", "live") for node in range(2)]

    assert printed(commands) == ["done 0 2 2"] * 2
