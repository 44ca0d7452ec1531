"""What the ranks of test_ranks do, each in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.errors import CorruptCheckpointError

Report = Callable[..., None]


def report_and_return(task: Any, comm: Any, report: Report) -> Any:
    report("begun", rank=comm.rank)
    return [task, comm.all_gather(comm.rank)]


def wait(scratch: Path, comm: Any, _report: Report) -> None:
    (scratch / f"{comm.rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)


def fail_on_rank_1(error: Exception, comm: Any, _report: Report) -> None:
    if comm.rank == 1:
        os.write(1, b"line before the end\n")
        raise error
    comm.all_gather(None)


def corrupt_on_rank_1(*, comm: Any, watch_of: Any) -> None:
    fail_on_rank_1(CorruptCheckpointError("w: damaged", key="w").at_rank(1), comm, watch_of)


def die_on_rank_1(_task: Any, comm: Any, _report: Report) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_gather(None)
