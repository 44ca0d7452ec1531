"""What a rank does that saves to an object store: a checkpoint, or its bytes as plain objects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorstore as ts
import torch
from torch import distributed as dist

import dist_ckpt_strategies
from benchmarks.contenders.one_state import ZARR_2, Contender, Megatron, Tensors
from benchmarks.contenders.roster import BOTO3_PUT, RAW_PUT
from benchmarks.measuring.gpt_state import GptSize, Shard, build_shards
from benchmarks.measuring.harness import RankContext, join_gloo
from benchmarks.measuring.store_site import StoreSite
from benchmarks.ranks.one_state import Worker

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

    def __init__(self, shards: tuple[Shard, ...], site: StoreSite) -> None:
        super().__init__(shards, ZARR_2)
        self._site = site

    def save(self, directory: Path) -> None:
        """See Contender."""
        dist_ckpt_strategies.save(self.state(), self._site.url(directory.name), self.backend)

    def load(self, directory: Path) -> Tensors:
        """See Contender."""
        wanted = self.sharded()
        loaded: Any = dist_ckpt_strategies.load(wanted, self._site.url(directory.name))
        return {key: loaded[key] for key in wanted}


class _TensorStorePuts:
    """Plain objects through TensorStore's key-value store, all asked for at once."""

    def __init__(self, shards: tuple[Shard, ...], site: StoreSite) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._pieces = list(_pieces(shards))
        self._site = site

    def save(self, directory: Path) -> None:
        """See Contender."""
        store = self._open(directory)
        for_all = [store.write(piece.name, bytes(piece.memory)) for piece in self._pieces]
        for pending in for_all:
            pending.result()

    def load(self, directory: Path) -> Tensors:
        """See Contender."""
        store = self._open(directory)
        pending = [store.read(piece.name) for piece in self._pieces]
        for piece, reply in zip(self._pieces, pending, strict=True):
            _fill(piece.memory, reply.result().value)
        return self._tensors

    def _open(self, directory: Path) -> Any:
        spec = {
            "driver": "s3",
            "bucket": self._site.bucket,
            "path": f"{directory.name}/",
            "endpoint": self._site.endpoint,
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "environment"},
            "use_conditional_write": False,
            "s3_request_retries": _RETRIES,
            "s3_request_concurrency": {"limit": _NUM_REQUESTS},
        }
        return ts.KvStore.open(spec, context=ts.Context()).result()


class _Boto3Puts:
    """Plain objects through boto3, from as many threads as there may be requests."""

    def __init__(self, shards: tuple[Shard, ...], site: StoreSite) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._pieces = list(_pieces(shards))
        self._bucket = site.bucket
        # Named at run time: it is slow to import, and a peer.
        config = importlib.import_module("botocore.config").Config(
            max_pool_connections=_NUM_REQUESTS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        )
        self._client = importlib.import_module("boto3").client(
            "s3", endpoint_url=site.endpoint, region_name="us-east-1", config=config
        )

    def save(self, directory: Path) -> None:
        """See Contender."""

        def put(piece: Piece) -> None:
            key = f"{directory.name}/{piece.name}"
            self._client.put_object(Bucket=self._bucket, Key=key, Body=bytes(piece.memory))

        self._each(put)

    def load(self, directory: Path) -> Tensors:
        """See Contender."""

        def get(piece: Piece) -> None:
            key = f"{directory.name}/{piece.name}"
            body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"]
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


_MAKERS: Final[Mapping[str, Callable[[tuple[Shard, ...], StoreSite], Contender]]] = {
    RAW_PUT: _TensorStorePuts,
    BOTO3_PUT: _Boto3Puts,
    "zarr 2": _ZarrAt,
}


def make_worker(
    size: GptSize, names: Sequence[str], site: StoreSite, context: RankContext
) -> Worker:
    """One of the ranks that hold the state in equal parts. Collective."""
    join_gloo(context)
    shards = build_shards(size, context.global_rank, context.num_ranks)
    return Worker.over(context, shards, lambda name: _MAKERS[name](shards, site), names)
