"""Save and load one GPT-like state in an object store, beside plain puts and gets of its bytes.

    python benchmarks/object_stores.py --out object_stores.jsonl

The server, Ceph's radosgw or moto, is started for the benchmark on this machine, keeps its objects
in memory, and shares the cores with the two ranks. The baseline puts and gets the same bytes, one
object for each shard or 64 MiB of it.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import numpy as np
import tensorstore as ts
import torch
from torch import distributed as dist

from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output, run_cases
from benchmarks.common.disks import touch_memory, workspace
from dist_ckpt_strategies.cli.bench_rank import (
    SECONDS,
    Candidate,
    GptSize,
    Packs,
    Sample,
    Shards,
    Tensors,
    build_shards,
    interleaved,
)
from tests.support.object_stores import ObjectStore, Radosgw, moto, why_no_radosgw

RADOSGW, MOTO = "radosgw", "moto"
RAW_PUT = "tensorstore put"
_NUM_RANKS = 2
_BUCKET = "bench"
_REQUEST_TIMEOUT_S = "120"
_OBJECT_NBYTES = 64 << 20
_NUM_REQUESTS = 32
"""Objects at most so large, and so many requests of a rank at the same time."""


class _Packs(Packs):
    def place(self, directory: Path) -> str | Path:
        return f"s3://{_BUCKET}/{directory.name}"


class _TensorStorePuts:
    """Plain objects through TensorStore's key-value store, all requested at once."""

    def __init__(self, shards: Shards) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._objects = dict(_objects(shards))

    def save(self, directory: Path) -> None:
        store = _open(directory)
        pending = [store.write(name, bytes(memory)) for name, memory in self._objects.items()]
        for write in pending:
            write.result()

    def load(self, directory: Path) -> Tensors:
        store = _open(directory)
        pending = [store.read(name) for name in self._objects]
        for memory, read in zip(self._objects.values(), pending, strict=True):
            # In one go; ``memoryview`` itself would copy byte by byte.
            np.asarray(memory)[:] = np.frombuffer(read.result().value, dtype=np.uint8)
        return self._tensors


def _open(directory: Path) -> Any:
    spec = {
        "driver": "s3",
        "bucket": _BUCKET,
        "path": f"{directory.name}/",
        "endpoint": os.environ["DIST_CKPT_S3_ENDPOINT"],
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
        "use_conditional_write": False,
        "s3_request_retries": {"max_retries": 4, "initial_delay": "50ms", "max_delay": "500ms"},
        "s3_request_concurrency": {"limit": _NUM_REQUESTS},
    }
    return ts.KvStore.open(spec, context=ts.Context()).result()


def _objects(shards: Shards) -> Iterator[tuple[str, memoryview]]:
    """Names, and the shards' bytes, in objects of equal size where a shard has several."""
    rank = dist.get_rank()
    for shard in shards:
        memory = shard.tensor.view(-1).view(torch.uint8)
        for number, part in enumerate(memory.chunk(-(-memory.numel() // _OBJECT_NBYTES))):
            yield f"{shard.key}/{rank}.{number}", memoryview(part.numpy().data)


class _Counted:
    """A candidate, and how many requests of this rank its last save or load took."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate, self.num_requests = candidate, 0

    @classmethod
    def made(cls, make: Callable[[Shards], Candidate], shards: Shards) -> Candidate:
        return cls(make(shards))

    def save(self, directory: Path) -> None:
        began = _num_requests()
        self._candidate.save(directory)
        self.num_requests = _num_requests() - began

    def load(self, directory: Path) -> Tensors:
        began = _num_requests()
        loaded = self._candidate.load(directory)
        self.num_requests = _num_requests() - began
        return loaded


def _num_requests() -> int:
    """Requests of this process that TensorStore has begun until now, without retries."""
    metrics = {
        metric["name"].rpartition("/")[2]: metric["values"][0].get("value", 0)
        for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/s3/")
    }
    return sum(metrics.get(name, 0) for name in ("read", "write", "delete", "list"))


MAKERS: Final[Mapping[str, Callable[[Shards], Candidate]]] = {
    RAW_PUT: _TensorStorePuts,
    "packs": _Packs,
}


def measure(
    size: GptSize, place: Path, repetitions: int, names: Sequence[str], store: ObjectStore
) -> list[Sample]:
    """Saves and loads on one of the ranks that hold equal parts. Collective.

    Of a path below ``place``, the last part is the name in the bucket; nothing is written there.
    """
    os.environ.update(store.variables | {"DIST_CKPT_STORE_TIMEOUT_S": _REQUEST_TIMEOUT_S})
    shards = build_shards(size, dist.get_rank(), _NUM_RANKS)
    makers = {name: partial(_Counted.made, make) for name, make in MAKERS.items()}
    entries = rounds.entries_of(shards, makers, names)

    def with_requests(sample: Sample) -> Sample:
        found: Any = entries[sample.candidate].candidate
        requests = float(sum(rounds.gathered(found.num_requests)))
        return replace(sample, values={**sample.values, "requests": requests})

    samples = []
    for repetition, name in interleaved(names, repetitions):
        rounds.on_first_rank(_delete_all, store, name)
        rounds.on_first_rank(touch_memory, size.nbytes)
        candidate = entries[name].candidate
        seconds = rounds.timed(lambda: candidate.save(place / name))  # noqa: B023 - called at once
        if repetition > 0:
            samples.append(with_requests(Sample("save", name, repetition, {SECONDS: seconds})))
    stored = {name: place / name for name in names}
    loads = rounds.load_rounds(entries, stored, "load", repetitions, size.nbytes)
    return samples + list(map(with_requests, loads))


def _delete_all(store: ObjectStore, checkpoint: str) -> None:
    for name in store.names(_BUCKET):
        if name.startswith(f"{checkpoint}/"):
            store.delete(_BUCKET, name)


@contextmanager
def _started(server: str, directory: Path | None) -> Iterator[ObjectStore]:
    """A server with its files in a directory, ended on leaving."""
    if server == MOTO:
        with moto() as store:
            yield store
        return
    with workspace(directory) as place:
        ceph = Radosgw(place)
        try:
            yield ceph.store
        finally:
            ceph.stop()


def main() -> None:
    """Save and load one GPT-like state in an object store with every candidate in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(MAKERS, (RAW_PUT,), in_memory=False)
    default = MOTO if why_no_radosgw() else RADOSGW
    parser.add_repeated("server", [default], "only these", choices=[RADOSGW, MOTO])
    options = parser.parse()
    with open_output(options.out, __file__) as output:
        for server in options.server:
            if server == RADOSGW and (reason := why_no_radosgw()):
                output.skip(server, reason)
                continue
            with _started(server, options.directory[0]) as store:
                store.make_bucket(_BUCKET)
                run_cases(options, output, _NUM_RANKS, measure, store, file_system=server)


if __name__ == "__main__":
    main()
