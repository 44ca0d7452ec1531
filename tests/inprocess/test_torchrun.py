"""Under torchrun itself: exceptions are survived in place, also across its nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    if started == "0" and dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
    return call.num_attempts, int(total)

num_attempts, total = block()
# In one piece: torchrun starts Python with -u, and then the parts of a print mix with others'.
sys.stdout.write(f"done {started} {num_attempts} {total}\\n")
"""


def test_an_exception_is_survived_in_place_and_a_death_by_a_start_of_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "train.py")
    variables = {
        "PYTHONPATH": str(ROOT),
        "RES_OPTIONS": "attempts:0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert re.findall(r"done .*", done.stdout) == ["done 1 2 2"] * 2
