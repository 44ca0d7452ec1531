"""How much of the package runs in one save and one load, and its collectives.

    python benchmarks/walk.py
    python benchmarks/walk.py --out walk.jsonl     # with the names of functions and files

Two ranks, eight regular shards each, the second save and the second load of a strategy. Counted
with ``sys.setprofile`` on all threads: distinct functions of the package that run (comprehensions
and lambdas count with the function they stand in), the files that they are in, and collectives of
torch.distributed on rank 0.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from benchmarks.common.command_line import ROOT, Parser, open_output
from benchmarks.common.disks import workspace
from benchmarks.common.rounds import run_on_ranks

STRATEGIES = (("safetensors", 1), ("zarr", 1))
NAMES = ("functions", "files", "collectives")
AIMS = {"save": (75, 14, 3), "load": (60, 11, 2)}

_NUM_RANKS = 2
_PACKAGE = f"{ROOT / 'dist_ckpt_strategies'}/"
_COLLECTIVES = {
    getattr(function, "__wrapped__", function).__code__: function.__name__
    for function in (
        dist.all_gather,
        dist.all_to_all_single,
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


def walk(strategy: tuple[str, int], root: Path) -> dict[str, dict[str, Any]]:
    """What the second save and the second load run, to and from two directories. Collective.

    Returns:
        By call, names of functions and files, and counts of collectives.
    """
    save, load = dist_ckpt_strategies.save, dist_ckpt_strategies.load
    save(_state(), root / "first", strategy)
    saved = recorded(lambda: save(_state(), root / "second", strategy))
    load(_state(), root / "first")
    loaded = recorded(lambda: load(_state(), root / "second"))
    return {"save": saved, "load": loaded}


def _state() -> dict[str, Any]:
    offset = (0, dist.get_rank(), _NUM_RANKS)
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.ones(64, 128), offset)
        for key in (f"layer.{number}.weight" for number in range(8))
    }


def recorded(call: Callable[[], object]) -> dict[str, Any]:
    """Functions and files of the package that run, on any thread, and torch's collectives."""
    functions: set[tuple[str, str, int]] = set()
    collectives: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        is_inline = code.co_name.startswith("<")  # a comprehension or a lambda
        if code.co_filename.startswith(_PACKAGE) and not is_inline:
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


def _is_within_another(frame: FrameType) -> bool:
    """Whether a collective is a step of another one, such as of ``all_gather_object``."""
    above = frame.f_back
    while above is not None and above.f_code.co_filename == frame.f_code.co_filename:
        if above.f_code in _COLLECTIVES:
            return True
        above = above.f_back
    return above is not None and above.f_code in _COLLECTIVES


def main() -> None:
    """Count the functions, files and collectives of a save and a load."""
    parser = Parser(__doc__)
    parser.add_argument("--directory", type=Path, help="where to write")
    options = parser.parse()
    with open_output(options.out, __file__) as output:
        for strategy in STRATEGIES:
            with workspace(options.directory) as scratch:
                args = (walk, strategy, scratch)
                found = run_on_ranks(_NUM_RANKS, *args, timeout_s=options.timeout_s)[0]
            for call, recorded in found.items():
                output.write("walk", strategy=strategy, call=call, **recorded)
                counts = [len(recorded["functions"]), len(recorded["files"])]
                counts.append(sum(recorded["collectives"].values()))
                pairs = zip(NAMES, counts, AIMS[call], strict=True)
                shown = ", ".join(f"{count} {name} (aim {aim})" for name, count, aim in pairs)
                print(f"{call}, {strategy}: {shown}")  # noqa: T201 - a command's output


if __name__ == "__main__":
    main()
