"""How much of the package runs in one save and one load, and how often ranks meet in collectives.

    python benchmarks/walk.py
    python benchmarks/walk.py --show

Two ranks, eight regular shards each, the second save and the second load of a strategy. Counted
with ``sys.setprofile`` on all threads: distinct functions of the package that run (comprehensions
and lambdas count with the function they stand in), the files that they are in, and collectives of
torch.distributed on rank 0.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
import torch.distributed as dist
import typer
from rich.table import Table

import dist_ckpt_strategies
from benchmarks.common.command_line import (
    NOWHERE,
    ROOT,
    Directory,
    Out,
    Smoke,
    TimeoutS,
    open_output,
)
from benchmarks.common.disks import workspace
from benchmarks.common.processes import RankContext, Ranks, join_gloo, quiet_imports

with quiet_imports():
    from megatron.core.dist_checkpointing import ShardedTensor

STRATEGIES = (("zarr", 1), ("zarr", 2))
AIMS = {"save": (110, 20, 6), "load": (90, 16, 3)}
"""Functions, files and collectives at most."""

_NUM_RANKS = 2
NUM_ARRAYS = 8
_SHAPE = (64, 128)
_PACKAGE = f"{ROOT / 'dist_ckpt_strategies'}/"
_COLLECTIVES = {
    getattr(function, "__wrapped__", function).__code__: function.__name__
    for function in (
        dist.all_gather,
        dist.all_gather_object,
        dist.all_reduce,
        dist.barrier,
        dist.batch_isend_irecv,
        dist.broadcast,
        dist.broadcast_object_list,
        dist.gather,
        dist.gather_object,
        dist.irecv,
        dist.isend,
        dist.reduce_scatter_tensor,
        dist.scatter,
        dist.scatter_object_list,
    )
}


class Worker:
    """One of the ranks."""

    def __init__(self, context: RankContext) -> None:
        """Make this rank's half of eight arrays."""
        join_gloo(context)
        self._rank = context.global_rank
        self._num_ranks = context.num_ranks

    def walk(self, strategy: tuple[str, int], root: Path) -> dict[str, dict[str, Any]]:
        """Save twice, to two directories, and load twice; what the second of each runs. Collective.

        Returns:
            Of the save and the load: names of functions, of files and counts of collectives.
        """
        save = dist_ckpt_strategies.save
        load = dist_ckpt_strategies.load
        save(self._state(), root / "first", strategy)
        saved = _recorded(lambda: save(self._state(), root / "second", strategy))
        load(self._state(), root / "first")
        loaded = _recorded(lambda: load(self._state(), root / "second"))
        return {"save": saved, "load": loaded}

    def _state(self) -> dict[str, Any]:
        offset = (0, self._rank, self._num_ranks)
        return {
            key: ShardedTensor.from_rank_offsets(key, torch.ones(_SHAPE), offset)
            for key in (f"layer.{number}.weight" for number in range(NUM_ARRAYS))
        }


def _recorded(call: Callable[[], object]) -> dict[str, Any]:
    """Functions and files of the package that run, on any thread, and torch's collectives."""
    functions: set[tuple[str, str, int]] = set()
    collectives: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE) and not _is_inline(code.co_name):
            name = code.co_filename.removeprefix(_PACKAGE)
            functions.add((name, code.co_qualname, code.co_firstlineno))
        elif code in _COLLECTIVES and not _is_within_another(frame):
            collectives[_COLLECTIVES[code]] += 1

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {
        "functions": sorted(f"{name}:{line} {function}" for name, function, line in functions),
        "files": sorted({name for name, _, _ in functions}),
        "collectives": dict(collectives),
    }


def _is_inline(name: str) -> bool:
    """Whether it is a comprehension or a lambda: a part of the function that it stands in."""
    return name.startswith("<")


def _is_within_another(frame: FrameType) -> bool:
    """Whether a collective is a step of another one, such as of ``all_gather_object``."""
    above = frame.f_back
    while above is not None and above.f_code.co_filename == frame.f_code.co_filename:
        if above.f_code in _COLLECTIVES:
            return True
        above = above.f_back
    return above is not None and above.f_code in _COLLECTIVES


def make_worker(context: RankContext) -> Worker:
    """One of the ranks. Collective."""
    return Worker(context)


def main(
    directory: Directory = None,
    out: Out = NOWHERE,
    smoke: Smoke = False,  # noqa: FBT002 - there is one size only
    timeout_s: TimeoutS = 120.0,
    *,
    show: Annotated[bool, typer.Option("--show", help="List the functions.")] = False,
) -> None:
    """Count the functions, files and collectives of a save and a load."""
    del smoke
    table = Table("strategy", "call", "functions", "files", "collectives", "aim")
    with (
        open_output(out, "walk.py") as output,
        Ranks(_NUM_RANKS, "benchmarks.walk", timeout_s=timeout_s) as ranks,
    ):
        for strategy in STRATEGIES:
            with workspace(directory) as scratch:
                found = ranks.step("walk", strategy, scratch).values[0]
            for call, recorded in found.items():
                output.write("walk", {"strategy": list(strategy), "call": call, **recorded})
                counts = (len(recorded["functions"]), len(recorded["files"]))
                collectives = sum(recorded["collectives"].values())
                aims = " ".join(map(str, AIMS[call]))
                table.add_row(f"{strategy}", call, *map(str, (*counts, collectives)), aims)
                if show:
                    output.console.print(f"{strategy} {call}", *recorded["functions"], sep="\n")
                    output.console.print(recorded["collectives"])
        output.console.print(table)


if __name__ == "__main__":
    typer.run(main)
