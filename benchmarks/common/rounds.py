"""Ranks and rounds: every candidate in turn, each from the same state of disk, cache and memory.

The first round of each step is not counted. A load fills tensors that are already there and have
been used: a candidate that returns new ones pays for the copy. Every load is checked.
"""

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist

from benchmarks.common.disks import (
    drop_cache,
    fill_cache,
    flush_share,
    fresh,
    is_in_memory,
    touch_memory,
)
from benchmarks.page.subjects import PLAIN_STREAM
from dist_ckpt_strategies.cli.bench_rank import (
    SECONDS,
    Candidate,
    Sample,
    Shards,
    Target,
    interleaved,
    seconds_of,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from tests.support.ranks import allow_torch_dist, run_processes

LOAD_WARM, LOAD_COLD = "load warm", "load cold"


def run_on_ranks(
    num_ranks: int, body: Callable[..., Any], *args: Any, timeout_s: float
) -> list[Any]:
    """What ``body(*args)`` returns on each of some new processes, which are a gloo group.

    Raises:
        RankDiedError: a rank failed; its traceback is on stderr.
        TimeoutError: a rank was not done in time.
    """
    found = run_processes(num_ranks, _run_or_end, body, args, timeout_s=timeout_s)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def _run_or_end(_rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """End the process where the body fails: its peers then lose their connection, and end too."""
    gc.unfreeze()  # collections take as long as in a process that has imported all by itself
    allow_torch_dist()
    try:
        return body(*args)
    except Exception:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
        os._exit(1)


def timed(step: Callable[[], object]) -> float:
    """Seconds from the first rank's start of a step to the last rank's end. Collective."""
    comm = open_communicator(None, timeout_s=3600.0, purpose="benchmark")
    comm.all_gather(None)
    return seconds_of(comm, step)


def gathered(value: Any) -> list[Any]:
    """The value of every rank, by rank. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first_rank(step: Callable[..., object], *args: Any) -> None:
    """Run a step on the first rank, while the others wait. Collective."""
    if dist.get_rank() == 0:
        step(*args)
    dist.barrier()


def flush(directory: Path) -> None:
    """Flush the files in a directory, each rank its share; returns when all have. Collective."""
    flush_share(directory, dist.get_rank(), dist.get_world_size())
    dist.barrier()


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate, and the tensors that its loads fill."""

    candidate: Candidate
    target: Target


def entries_of(
    shards: Shards, makers: Mapping[str, Callable[[Shards], Candidate]], names: Sequence[str]
) -> dict[str, Entry]:
    """Candidates that all have the same shards. Collective."""
    target = Target({shard.key: shard.tensor for shard in shards})
    return {name: Entry(makers[name](shards), target) for name in names}


def save_rounds(
    entries: Mapping[str, Entry], directory: Path, repetitions: int, nbytes: int
) -> Iterator[Sample]:
    """Time saves to subdirectories with the candidates' names, where the last ones stay.

    Collective. ``nbytes`` is what all ranks hold together.
    """
    for repetition, name in interleaved(list(entries), repetitions):
        on_first_rank(fresh, directory, name)
        on_first_rank(touch_memory, nbytes)
        target, candidate = directory / name, entries[name].candidate
        seconds = timed(lambda: candidate.save(target))  # noqa: B023 - called at once
        flush(target)
        # All others have flushed their files when the save returns.
        durable = {} if name == PLAIN_STREAM else {"durable_seconds": seconds}
        if repetition > 0:
            yield Sample("save", name, repetition, {SECONDS: seconds, **durable})


def load_steps(place: Path) -> list[str]:
    """The loads that can be timed there: what is in memory has no cold one."""
    return [LOAD_WARM] if is_in_memory(place) else [LOAD_WARM, LOAD_COLD]


def load_rounds(
    entries: Mapping[str, Entry],
    stored: Mapping[str, Path],
    step: str,
    repetitions: int,
    nbytes: int,
) -> Iterator[Sample]:
    """Time loads of what is stored for each candidate, and check each. Collective.

    They are cold for LOAD_COLD, and warm for any other step. ``nbytes`` is as for saves.
    """
    for repetition, name in interleaved(list(stored), repetitions):
        entry, place = entries[name], stored[name]
        entry.target.clear()
        on_first_rank(touch_memory, nbytes)
        on_first_rank(drop_cache if step == LOAD_COLD else fill_cache, place)
        seconds = timed(lambda: entry.target.accept(entry.candidate.load(place)))  # noqa: B023
        entry.target.check(name)
        if repetition > 0:
            yield Sample(step, name, repetition, {SECONDS: seconds})
