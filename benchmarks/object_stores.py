"""Save and load one GPT-like state in an object store, beside plain puts and gets of its bytes.

    python benchmarks/object_stores.py --out object_stores.jsonl
    python benchmarks/object_stores.py --smoke --server moto

The server, Ceph's radosgw or moto, is started for the benchmark on this machine, keeps its objects
in memory, and shares the cores with the ranks. Two ranks, alternating candidates, medians; every
load is checked; the first round is not counted. The baselines put and get the same bytes, one
object for each shard or 64 MiB of it, with as many requests at the same time as format 2 has.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import numpy as np
import tensorstore as ts
import torch
import typer
from torch import distributed as dist

import dist_ckpt_strategies
from benchmarks.candidates.one_state import ZARR_2, Candidate, Megatron, Tensors
from benchmarks.common.command_line import (
    Comparison,
    Output,
    among,
    comparison_command,
    missing_package,
)
from benchmarks.common.disks import touch_memory, workspace
from benchmarks.common.processes import RankContext, Ranks, join_gloo
from benchmarks.common.rounds import SECONDS, Case, Sample, Step, alternate, load_rounds
from benchmarks.common.states import GptSize, Shard, build_shards
from benchmarks.common.worker import Worker
from tests.support.object_stores import Radosgw, moto, why_no_radosgw

RADOSGW, MOTO = "radosgw", "moto"
RAW_PUT = "tensorstore put"
_NUM_RANKS = 2
_BUCKET = "bench"
_REQUEST_TIMEOUT_S = "120"
_NOWHERE = Path("/nowhere")
"""No file lies there: of such a path only the last part counts, as the name in the bucket."""

_DELETES_AT_A_TIME = 1000
_OBJECT_NBYTES = 64 << 20
_NUM_REQUESTS = 32
"""As in format 2: objects at most so large, and so many requests of a rank at the same time."""

_RETRIES = {"max_retries": 4, "initial_delay": "50ms", "max_delay": "500ms"}


@dataclass(frozen=True, slots=True)
class Piece:
    """An object: some bytes of a shard.

    Attributes:
        name: of the object.
        memory: the bytes, where they lie.
    """

    name: str
    memory: memoryview


class _ZarrAt(Megatron):
    """This package's own entry points: Megatron-Core's know no object stores."""

    def __init__(self, endpoint: str, shards: tuple[Shard, ...]) -> None:
        super().__init__(shards, ZARR_2)
        self._endpoint = endpoint

    def save(self, directory: Path) -> None:
        dist_ckpt_strategies.save(self.state(), f"s3://{_BUCKET}/{directory.name}", self.backend)

    def load(self, directory: Path) -> Tensors:
        wanted = self.sharded()
        loaded: Any = dist_ckpt_strategies.load(wanted, f"s3://{_BUCKET}/{directory.name}")
        return {key: loaded[key] for key in wanted}


class _TensorStorePuts:
    """Plain objects through TensorStore's key-value store, all asked for at once."""

    def __init__(self, endpoint: str, shards: tuple[Shard, ...]) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._pieces = list(_pieces(shards))
        self._endpoint = endpoint

    def save(self, directory: Path) -> None:
        store = self._open(directory)
        for_all = [store.write(piece.name, bytes(piece.memory)) for piece in self._pieces]
        for pending in for_all:
            pending.result()

    def load(self, directory: Path) -> Tensors:
        store = self._open(directory)
        pending = [store.read(piece.name) for piece in self._pieces]
        for piece, reply in zip(self._pieces, pending, strict=True):
            _fill(piece.memory, reply.result().value)
        return self._tensors

    def _open(self, directory: Path) -> Any:
        spec = {
            "driver": "s3",
            "bucket": _BUCKET,
            "path": f"{directory.name}/",
            "endpoint": self._endpoint,
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "environment"},
            "use_conditional_write": False,
            "s3_request_retries": _RETRIES,
            "s3_request_concurrency": {"limit": _NUM_REQUESTS},
        }
        return ts.KvStore.open(spec, context=ts.Context()).result()


class _Boto3Puts:
    """Plain objects through boto3, from as many threads as there may be requests."""

    def __init__(self, endpoint: str, shards: tuple[Shard, ...]) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._pieces = list(_pieces(shards))
        # Named at run time: it is slow to import, and a peer.
        config = importlib.import_module("botocore.config").Config(
            max_pool_connections=_NUM_REQUESTS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        )
        self._client = importlib.import_module("boto3").client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", config=config
        )

    def save(self, directory: Path) -> None:

        def put(piece: Piece) -> None:
            key = f"{directory.name}/{piece.name}"
            self._client.put_object(Bucket=_BUCKET, Key=key, Body=bytes(piece.memory))

        self._each(put)

    def load(self, directory: Path) -> Tensors:

        def get(piece: Piece) -> None:
            key = f"{directory.name}/{piece.name}"
            body = self._client.get_object(Bucket=_BUCKET, Key=key)["Body"]
            _fill(piece.memory, body.read())

        self._each(get)
        return self._tensors

    def _each(self, body: Callable[[Piece], None]) -> None:
        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            for _ in pool.map(body, self._pieces):
                pass


def _pieces(shards: Sequence[Shard]) -> Iterator[Piece]:
    """The shards' bytes, in objects of equal size where they are cut."""
    rank = dist.get_rank()
    for shard in shards:
        memory = shard.tensor.view(-1).view(torch.uint8)
        num_pieces = -(-memory.numel() // _OBJECT_NBYTES)
        for number, part in enumerate(memory.chunk(num_pieces)):
            yield Piece(f"{shard.key}/{rank}.{number}", memoryview(part.numpy().data))


def _fill(memory: memoryview, content: bytes) -> None:
    """Copy into memory in one go; ``memoryview`` itself would go byte by byte."""
    np.asarray(memory)[:] = np.frombuffer(content, dtype=np.uint8)


MAKERS: Mapping[str, Callable[[str, tuple[Shard, ...]], Candidate]] = MappingProxyType(
    {RAW_PUT: _TensorStorePuts, "boto3 put": _Boto3Puts, "zarr 2": _ZarrAt}
)


def make_worker(size: GptSize, names: Sequence[str], endpoint: str, context: RankContext) -> Worker:
    """One of the ranks that hold the state in equal parts. Collective."""
    join_gloo(context)
    shards = build_shards(size, context.global_rank, context.num_ranks)
    makers = {name: partial(MAKERS[name], endpoint) for name in names}
    return Worker.over(context, shards, makers, names)


def why_not(server: str) -> str | None:
    """Why there can be no such server here; None where there can."""
    if missing := missing_package("boto3"):
        return missing
    return why_no_radosgw() if server == RADOSGW else missing_package("moto")


@contextmanager
def open_store(server: str, directory: Path) -> Iterator[Any]:
    """A server with its files in a directory, ended on leaving; see tests/support."""
    if server == MOTO:
        with moto() as store:
            yield store
        return
    ceph = Radosgw(directory)
    try:
        yield ceph.store
    finally:
        ceph.stop()


def delete_below(client: Any, bucket: str, name: str) -> None:
    """Delete all objects of a checkpoint."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{name}/")
    found = [{"Key": one["Key"]} for page in pages for one in page.get("Contents", ())]
    for start in range(0, len(found), _DELETES_AT_A_TIME):
        some = found[start : start + _DELETES_AT_A_TIME]
        client.delete_objects(Bucket=bucket, Delete={"Objects": some, "Quiet": True})


def _run_size(
    size: GptSize, server: str, store: Any, comparison: Comparison, output: Output
) -> None:
    args = ("benchmarks.object_stores", size, comparison.names, store.endpoint)
    with Ranks(_NUM_RANKS, *args, timeout_s=comparison.timeout_s) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        case = Case(server, nbytes, size.num_arrays, _NUM_RANKS)
        output.write_samples(case, _rounds(ranks, case, store.client(), comparison))


def _rounds(ranks: Ranks, case: Case, client: Any, comparison: Comparison) -> Iterator[Sample]:
    """Saves, the last of which stay, and loads of those."""
    for repetition, name in alternate(comparison.names, comparison.repetitions + 1):
        delete_below(client, _BUCKET, name)
        touch_memory(case.held_nbytes)
        seconds = ranks.step("save", name, _NOWHERE / name).seconds
        if repetition > 0:
            yield Sample("save", name, repetition, {SECONDS: seconds})
    stored = {name: _NOWHERE / name for name in comparison.names}
    for sample in load_rounds(ranks, case, Step.LOAD_WARM, stored, comparison.repetitions):
        yield Sample("load", sample.candidate, sample.repetition, sample.values)


@comparison_command(list(MAKERS), (RAW_PUT,), in_memory=False)
def main(
    comparison: Comparison,
    output: Output,
    *,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="radosgw or moto.",
            show_default="radosgw, else moto",
            callback=among((RADOSGW, MOTO)),
        ),
    ] = None,
) -> None:
    """Save and load one GPT-like state in an object store with every candidate in turn.

    What is written to a directory are the server's own files.
    """
    for place in comparison.places:
        for one in server or [MOTO if why_not(RADOSGW) else RADOSGW]:
            if reason := why_not(one):
                output.skip(one, reason)
            else:
                with workspace(place) as directory:
                    _run_server(one, directory, comparison, output)


def _run_server(server: str, directory: Path, comparison: Comparison, output: Output) -> None:
    """Time every size against a server of its own."""
    for size in comparison.sizes:
        place = directory / f"{server}-{size.hidden}"
        place.mkdir()
        with open_store(server, place) as store:
            os.environ.update(store.variables | {"DIST_CKPT_STORE_TIMEOUT_S": _REQUEST_TIMEOUT_S})
            store.make_bucket(_BUCKET)
            _run_size(size, server, store, comparison, output)


if __name__ == "__main__":
    typer.run(main)
