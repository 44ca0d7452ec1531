"""What the checks of docs/right_state.md cost: a save's comparison, and compare beside a load.

    python benchmarks/right_state.py DIR [MB]

One process. Medians of five rounds, in which all take turns; the page cache is warm.
"""

import logging
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from dist_ckpt_strategies import compare, load, save
from dist_ckpt_strategies.sharded import save as engine

NUM_ARRAYS = 64


Seconds = tuple[float, float]
"""By the clock, and of all processors."""


def timed(action: Callable[[], Any]) -> Seconds:
    """What the action takes."""
    began = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def counted(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The function, which adds what it takes to ``spent``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        for n, seconds in enumerate(timed(lambda: results.append(function(*args, **kwargs)))):
            spent[n] += seconds
        return results[0]

    return call


def main(directory: Path, nbytes: int) -> None:
    """Print the medians."""
    logging.disable(logging.WARNING)
    rows = nbytes // (NUM_ARRAYS * 4 * 1024)
    tensors = {f"layer{n}.weight": torch.randn(rows, 1024) for n in range(NUM_ARRAYS)}
    state = {key: ShardedTensor.from_rank_offsets(key, t) for key, t in tensors.items()}
    spent = [0.0, 0.0]
    for name in ("described_save", "compared", "judged"):
        setattr(engine, name, counted(getattr(engine, name), spent))
    found: dict[str, list[Seconds]] = {}
    for number in range(6):
        spent[:] = 0.0, 0.0
        place = directory / f"iter_{number}"
        seconds = {"save": timed(partial(save, state, place))}
        seconds["of that, the comparison"] = spent[0], spent[1]
        shutil.rmtree(directory / f"iter_{number - 1}", ignore_errors=True)
        seconds["load, verified"] = timed(partial(load, state, place))
        seconds["compare, equal"] = timed(partial(compare, state, place))
        tensors["layer0.weight"][0, 0] += 1
        seconds["compare, one array of 64 differs"] = timed(partial(compare, state, place))
        for name, value in seconds.items() if number else ():
            found.setdefault(name, []).append(value)
    for name, values in found.items():
        clock, cpu = map(statistics.median, zip(*values, strict=True))
        sys.stdout.write(f"{name:34} {clock:.4f} s, processors {cpu:.4f} s\n")


if __name__ == "__main__":
    megabytes = int(sys.argv[2]) if len(sys.argv) > 2 else 512  # noqa: PLR2004
    main(Path(sys.argv[1]), megabytes << 20)
