"""One rank of the benchmark: ``python -m dist_ckpt_strategies.cli.bench.worker RANK TASK``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dist_ckpt_strategies.cli.bench.contenders import (
    Contender,
    build_contender,
    prepare_megatron,
)
from dist_ckpt_strategies.cli.bench.state import Part, build_parts
from dist_ckpt_strategies.cli.bench.task import LOAD, SAVE, BenchTask
from dist_ckpt_strategies.cli.demo.events import EVENTS_NAME, EventWriter, StepTimed
from dist_ckpt_strategies.cli.demo.ranks import write_failure


class _Rank:
    """Saves and loads with every contender in turn. Every method is collective over the world."""

    def __init__(self, global_rank: int, task: BenchTask) -> None:
        self._task = task
        self._is_first = global_rank == 0
        self._events = EventWriter(task.scratch / EVENTS_NAME if self._is_first else None)
        self._parts = build_parts(task.nbytes, global_rank, task.num_ranks)
        self._nbytes = sum(part.tensor.nbytes for part in self._parts)

    def run(self) -> None:
        """All rounds."""
        contenders = {name: build_contender(name, self._parts) for name in self._task.contenders}
        for turn, (repetition, name) in enumerate(self._task.turns()):
            self._save_and_load(contenders[name], turn, repetition, name)

    def _save_and_load(self, contender: Contender, turn: int, repetition: int, name: str) -> None:
        directory = self._task.workspace / str(turn)
        if self._is_first:
            directory.mkdir()
        self._time(lambda: contender.save(directory), SAVE, repetition, name)
        _clear(self._parts)
        _drop_cache(_own_share(directory))
        self._time(lambda: contender.load(directory), LOAD, repetition, name)
        _require_loaded(self._parts, name)
        dist.barrier()
        _empty(_own_share(directory))

    def _time(self, step: Callable[[], None], what: str, repetition: int, name: str) -> None:
        """Report the seconds from the first rank's start to the last rank's end."""
        dist.barrier()
        began = time.perf_counter()
        step()
        own = torch.tensor([began, time.perf_counter(), self._nbytes], dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self._task.num_ranks)]
        dist.all_gather(found, own)
        times = torch.stack(found)
        seconds = float(times[:, 1].max() - times[:, 0].min())
        nbytes = int(times[:, 2].sum())
        self._events.write(StepTimed(what, name, repetition, seconds, nbytes, len(self._parts)))


def _clear(parts: Sequence[Part]) -> None:
    """So that a load that does nothing is found out."""
    for part in parts:
        part.tensor.zero_()


def _require_loaded(parts: Sequence[Part], name: str) -> None:
    wrong = next((part.key for part in parts if not part.has_come_back()), None)
    if wrong is not None:
        raise ValueError(f"{wrong}: {name} loaded other values than were saved")


def _own_share(directory: Path) -> list[Path]:
    """This rank's share of the files below."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return files[dist.get_rank() :: dist.get_world_size()]


def _drop_cache(files: Sequence[Path]) -> None:
    """Have the page cache forget files, which are flushed; where the kernel can do that."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _empty(files: Sequence[Path]) -> None:
    """Give their space back.

    They are removed at the end: some file systems are slow at making directories right after many
    files were removed.
    """
    for path in files:
        os.truncate(path, 0)


def _end_with_parent() -> None:
    """End this process, and all that it has started, as soon as the one that started it says so.

    That one holds the other end of our standard input, and closes it where it stops us or dies.
    """
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


def _leave_it_to_the_pipe(_signal_number: int, _frame: object) -> None:
    """SIGTERM would end this process alone; who sends it has closed our standard input, too."""


def _carry_out(global_rank: int, task: BenchTask) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.scratch / 'rendezvous'}",
        rank=global_rank,
        world_size=task.num_ranks,
        timeout=timedelta(seconds=task.timeout_s),
    )
    prepare_megatron()
    _Rank(global_rank, task).run()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Run one rank.

    Args:
        arguments: the global rank, and the task as JSON.
    """
    global_rank, task = int(arguments[0]), BenchTask.from_json(arguments[1])
    # A session of its own: Ctrl-C is for the command, which ends its ranks; and torch_dist's
    # helper processes end with them.
    os.setsid()
    signal.signal(signal.SIGTERM, _leave_it_to_the_pipe)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _carry_out(global_rank, task)
    except BaseException as error:
        write_failure(task.scratch, global_rank, error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
