"""What one rank of a large job spends on the plans of saves and loads.

    python benchmarks/planning.py --out planning.jsonl
    python benchmarks/planning.py --ranks 16384 --arrays 1000

One process does what one rank of thousands would: the first, which proves that all shards make up
the arrays, or another. The job has TP 8: three quarters of the arrays are weights, cut into
eight by rows and held by every data-parallel rank; the others are flat optimizer buffers, each of
one tensor-parallel rank, cut unevenly among its data-parallel ranks. Each case runs in a new
process. Nothing is sent, read or written.
"""

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from secrets import token_hex
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import numpy as np

from benchmarks.common.command_line import Parser, open_output
from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, ShardId, ShardSpec
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable
from dist_ckpt_strategies.formats.index import (
    FullIndex,
    NewSave,
    PackSummary,
    array_segments,
    build_full_index,
)
from dist_ckpt_strategies.formats.pack import lay_out
from dist_ckpt_strategies.formats.pack_write import PackRecord
from dist_ckpt_strategies.sharded.ledger import Description, Ledger, described, proved
from dist_ckpt_strategies.sharded.load import build_read_item
from dist_ckpt_strategies.two_stage.plan import build_group_plan, encode_regions

_TENSOR_PARALLEL: Final = 8
_ROWS, _COLUMNS = 64, 256
"""Of what one rank holds of a weight: 64 KiB."""

_FRAGMENT = 10_000
"""Elements of an optimizer buffer that a data-parallel rank holds, and a few more or less."""

_NUM_LAYERS, _NUM_BLOCKS = 128, 41
"""Of the job whose index is opened: its layers, and blocks of each of 32 arrays of a layer."""

_MAX_INFLIGHT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """A job at TP 8 and DP ``num_ranks / 8`` whose checkpoint has ``num_arrays`` arrays."""

    num_ranks: int
    num_arrays: int

    @property
    def data_parallel(self) -> int:
        """Ranks that hold the same weights."""
        return self.num_ranks // _TENSOR_PARALLEL

    def shards_of(self, rank: int) -> tuple[ShardSpec, ...]:
        """All that a rank holds."""
        data, tensor = divmod(rank, _TENSOR_PARALLEL)
        return (*self._weights(tensor, data), *self._optimizer(tensor, data))

    def _weights(self, tensor: int, data: int) -> Iterator[ShardSpec]:
        region = Region((tensor * _ROWS, 0), (_ROWS, _COLUMNS))
        shape = (_TENSOR_PARALLEL * _ROWS, _COLUMNS)
        for number in range(self.num_arrays * 3 // 4):
            shard = ShardId(f"decoder.layers.{number:06}.weight", region)
            is_main = number % self.data_parallel == data
            yield ShardSpec(shard, shape, DType.BFLOAT16, is_main=is_main)

    def _optimizer(self, tensor: int, data: int) -> Iterator[ShardSpec]:
        starts = [part * _FRAGMENT + part % 7 for part in range(self.data_parallel)]
        starts.append(self.data_parallel * _FRAGMENT)
        region = Region((starts[data],), (starts[data + 1] - starts[data],))
        for number in range(self.num_arrays * 3 // 4, self.num_arrays):
            if number % _TENSOR_PARALLEL == tensor:
                shard = ShardId(f"optimizer.buckets.{number:06}.exp_avg", region)
                yield ShardSpec(shard, (starts[-1],), DType.FLOAT32)

    def stored(self) -> dict[str, ArraySpec]:
        """The arrays as format 1 stores them."""
        found = {}
        for tensor in range(_TENSOR_PARALLEL):
            for shard in self.shards_of(tensor):
                chunk = shard.region.shape
                found[shard.key] = ArraySpec(shard.key, shard.array_shape, shard.dtype, chunk)
        return found


def _save_first(job: Job) -> dict[str, float]:
    """On the first rank: the proof that all ranks' shards make up the arrays, and the index."""
    ranks = range(job.num_ranks)
    told, num_shards = [], 0
    copies: dict[str, bytes] = {}
    for rank in ranks:
        num_packs, main, of_rank, digest = _described(job, rank)
        told.append((num_packs, main, digest))
        copies.setdefault(digest, of_rank)
        num_shards += len(job.shards_of(rank))
    ledger = Ledger("", tuple(told), copies)
    return _measured(lambda: proved(ledger, ranks), num_shards)


def _save_other(job: Job) -> dict[str, float]:
    """On any other: the layout of its packs, and their description."""
    return _measured(lambda: _described(job, 1), len(job.shards_of(1)))


def _described(job: Job, rank: int) -> Description:
    shards = job.shards_of(rank)
    layout = lay_out([shard for shard in shards if shard.is_main], rank=rank)
    return described(layout, [shard for shard in shards if not shard.is_main], ())


def _load(job: Job) -> dict[str, float]:
    wants, stored = job.shards_of(0), job.stored()
    return _measured(lambda: [build_read_item(w, stored[w.key]) for w in wants], len(wants))


def _two_stage(job: Job) -> dict[str, float]:
    """Of a data-parallel group: all want the same weights, and each its own optimizer state."""
    arrays = list(job.stored().values())
    numbers = {array.key: number for number, array in enumerate(arrays)}
    group = range(0, job.num_ranks, _TENSOR_PARALLEL)
    requests = [
        encode_regions((numbers[shard.key], shard.region) for shard in job.shards_of(rank))
        for rank in group
    ]

    def plan() -> None:
        found = build_group_plan(
            requests, arrays, [None] * len(requests), max_inflight_bytes=_MAX_INFLIGHT_BYTES
        )
        found.rounds_of(0)

    return _measured(plan, sum(len(request.splitlines()) for request in requests))


def _open(job: Job) -> dict[str, float]:
    """What a rank reads of the index of a large job: that of 500,000 blocks, a pack for each rank.

    Weights and two moments of 128 layers; the rank wants those of its pipeline stage, two layers.
    """
    keys = [
        f"{state}layers.{layer:03}.{number:02}.weight"
        for state in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
        for layer in range(_NUM_LAYERS)
        for number in range(32)
    ]
    blocks = np.arange(len(keys) * _NUM_BLOCKS)
    array, part = np.divmod(blocks, _NUM_BLOCKS)
    table = BlockTable(
        tuple(keys),
        (ArrayFacts("bfloat16", (_NUM_BLOCKS * _ROWS, _COLUMNS)),) * len(keys),
        array,
        np.stack([part * _ROWS, np.zeros_like(part)], 1),
        np.broadcast_to([_ROWS, _COLUMNS], (len(blocks), 2)),
        np.stack([blocks % job.num_ranks, blocks, blocks], 1),
    )
    digest = token_hex(16)
    packs = [
        PackRecord(token_hex(8), digest, 1 << 30, 4096, 4096, rank) for rank in range(job.num_ranks)
    ]
    content, pointer = build_full_index(
        NewSave("s", array_segments(table), [PackSummary(tuple(packs))], {})
    )
    sizes: list[int] = []

    def read(byte_offset: int, nbytes: int) -> bytes:
        sizes.append(nbytes)
        return content[byte_offset : byte_offset + nbytes]

    def find() -> None:
        index = FullIndex(pointer, read, "index")
        found = index.find([key for key in keys if "layers.006." in key or "layers.007." in key])
        index.packs(np.unique(found.place[:, 0]).tolist())

    cost = _measured(find, len(blocks))
    return cost | {"num_requests": len(sizes), "read_nbytes": sum(sizes)}


PLANNERS: Final[Mapping[str, Callable[[Job], dict[str, float]]]] = {
    "save, first rank": _save_first,
    "save, other rank": _save_other,
    "load": _load,
    "two-stage load": _two_stage,
    "open": _open,
}


def _measured(plan: Callable[[], object], num_shards: int) -> dict[str, float]:
    """What a plan of so many shards costs in this process, which has done nothing else before.

    The memory is the most that is resident beyond the descriptions of the shards.
    """
    gc.freeze()  # the descriptions are not looked through again and again
    before = _peak_nbytes()
    started = time.process_time()
    plan()
    seconds, nbytes = time.process_time() - started, _peak_nbytes() - before
    return {"cpu_seconds": seconds, "memory_nbytes": nbytes, "num_shards": num_shards}


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Plan saves and loads for jobs of many ranks."""
    parser = Parser(__doc__)
    parser.add_repeated("ranks", [64, 1024], "multiples of 8", type=int)
    parser.add_argument("--arrays", type=int, default=10_000, help="of the checkpoint (10,000)")
    options = parser.parse()
    sizes = [16] if options.smoke else options.ranks
    if any(size < _TENSOR_PARALLEL or size % _TENSOR_PARALLEL for size in sizes):
        parser.error(f"--ranks {sizes}: expected multiples of {_TENSOR_PARALLEL}")
    fresh = None if options.smoke else 1  # a process for each plan
    pool = ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=fresh)
    with open_output(options.out, __file__) as output, pool:
        for name, planner in PLANNERS.items():
            for size in sizes:
                # 1,024 ranks describe as many shards with a sixteenth of the arrays.
                num_arrays = 80 if options.smoke else options.arrays * 64 // max(64, size)
                job = Job(size, max(80, num_arrays))
                cost = pool.submit(planner, job).result()
                output.write("planning", **cost, planner=name, job=asdict(job))


if __name__ == "__main__":
    main()
