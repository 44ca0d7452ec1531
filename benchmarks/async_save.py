"""Save one GPT-like state asynchronously: for how long does training wait?

    python benchmarks/async_save.py --out async_save.jsonl

Two ranks. Seconds until the call returns and the tensors may be overwritten, beside a copy of the
rank's bytes into memory that is in use; and seconds until the checkpoint is complete. The last save
of each is loaded and compared.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch import distributed as dist

import dist_ckpt_strategies
from benchmarks.common.command_line import Parser, open_output, run_cases
from benchmarks.common.disks import fresh, touch_memory
from benchmarks.common.rounds import on_first_rank, timed
from benchmarks.page.subjects import MEMCPY
from dist_ckpt_strategies.cli.bench_rank import (
    PACKS,
    SECONDS,
    TORCH_DIST,
    ZARR_1,
    GptSize,
    Megatron,
    Sample,
    Shards,
    Target,
    build_shards,
    interleaved,
)

NUM_RANKS = 2


class AsyncCandidate(Protocol):
    """One way to save: ``begin`` is what training waits for; after ``finish`` it is complete."""

    def begin(self, directory: Path) -> None: ...

    def finish(self) -> None: ...


class _SaveAsync(Megatron):
    """This package's ``save_async``."""

    _handle: dist_ckpt_strategies.SaveHandle

    def begin(self, directory: Path) -> None:
        self._handle = dist_ckpt_strategies.save_async(
            self.state(), directory, self.backend, validate_access_integrity=True
        )

    def finish(self) -> None:
        self._handle.wait()


class _Queue(Megatron):
    """Megatron-Core's backend and its queue, which forks a process for each save."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards, TORCH_DIST)
        vars(filesystem_async)["_results_queue"] = None  # it makes one that processes share
        self._queue: Any = AsyncCallsQueue()

    def begin(self, directory: Path) -> None:
        request = dist_checkpointing.save(
            self.state(), str(directory), self.backend, async_sharded_save=True
        )
        self._queue.schedule_async_request(request)

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)


class _Memcpy:
    """A copy of the rank's bytes into memory that is there and was used.

    It is shared memory: other memory is write-protected when torch_dist's queue forks, and then
    takes twice as long to write to.
    """

    def __init__(self, shards: Shards) -> None:
        self._pairs = [
            (shard.tensor.clone().share_memory_(), shard.tensor)  # type: ignore[no-untyped-call]
            for shard in shards
        ]

    def begin(self, directory: Path) -> None:
        del directory
        for copy, tensor in self._pairs:
            copy.copy_(tensor)

    def finish(self) -> None:
        """Nothing is left."""


MAKERS: Final[Mapping[str, Callable[[Shards], AsyncCandidate]]] = {
    MEMCPY: _Memcpy,
    "packs": partial(_SaveAsync, backend=PACKS),
    "zarr 1": partial(_SaveAsync, backend=ZARR_1),
    "torch_dist, queue": _Queue,
}


def measure(size: GptSize, place: Path, repetitions: int, names: list[str]) -> list[Sample]:
    """Saves in one place, on one of the ranks that hold equal parts. Collective."""
    shards = build_shards(size, dist.get_rank(), NUM_RANKS)
    candidates = {name: MAKERS[name](shards) for name in names}
    samples = []
    for repetition, name in interleaved(names, repetitions):
        on_first_rank(fresh, place, name)
        on_first_rank(touch_memory, size.nbytes)
        candidate = candidates[name]
        seconds = timed(lambda: candidate.begin(place / name))  # noqa: B023 - called at once
        values = {SECONDS: seconds, "until_there": seconds + timed(candidate.finish)}
        if repetition > 0:
            samples.append(Sample("blocking", name, repetition, values))
    target = Target({shard.key: shard.tensor for shard in shards})
    for name, candidate in candidates.items():
        if isinstance(candidate, Megatron):
            target.clear()
            target.accept(candidate.load(place / name))
            target.check(name)
    return samples


def main() -> None:
    """Save one GPT-like state asynchronously with every candidate in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(MAKERS, (MEMCPY,))
    options = parser.parse()
    with open_output(options.out, __file__) as output:
        run_cases(options, output, NUM_RANKS, measure, part="blocking")


if __name__ == "__main__":
    main()
