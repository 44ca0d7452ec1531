"""What is asked of an object store: few requests, plain ones, no more bytes than needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.config import Options, StoreOptions
from dist_ckpt_strategies.errors import StoreAccessError
from dist_ckpt_strategies.plan.chunking import MAX_OBJECT_NBYTES
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.manifest import ArrayRecord, ChunkRecord
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.base import ArrayRead, ArrayWrite
from dist_ckpt_strategies.storage.buckets.arrays import BucketReader, BucketWriter
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.locations import located
from tests.support.faulty_proxy import DENIED, NONE, Fault, FaultyProxy, Request
from tests.support.object_stores import ObjectStore
from tests.support.samples import random_values
from tests.support.sharding import differences, no_data, on_grid, state_of

pytestmark = [
    pytest.mark.parametrize("store", ["moto"], indirect=True),
]

FORMAT2 = ("zarr", 2)


@pytest.fixture
def proxy(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, for this process."""
    with FaultyProxy(store) as found:
        for name, value in found.store.variables.items():
            monkeypatch.setenv(name, value)
        yield found


def test_a_save_begins_with_save_json_and_ends_with_the_marker(
    proxy: FaultyProxy, bucket: str
) -> None:
    url = f"s3://{bucket}/run"
    for generation in range(2):
        proxy.requests.clear()
        state = state_of(0, [on_grid("w", (4, 4), (1, 1))])
        dist_ckpt_strategies.save(state, url, FORMAT2, overwrite=True)

        changes = [(r.method, r.path) for r in proxy.requests if r.method not in {"GET", "HEAD"}]
        puts = [path for method, path in changes if method == "PUT"]
        assert {method for method, _ in changes} <= {"PUT", "DELETE"}
        assert puts[0].endswith("/run/manifest/save.json")
        assert puts[-2:] == [f"/{bucket}/run/manifest/index.json", f"/{bucket}/run/metadata.json"]
        assert len(puts) == len(set(puts))
        first = ("DELETE", "metadata.json") if generation else ("PUT", "manifest/save.json")
        assert changes[0] == (first[0], f"/{bucket}/run/{first[1]}")
        later = changes[changes.index(("PUT", puts[0])) :]
        assert not [path for method, path in later if method == "DELETE" and "arrays" in path]


def test_who_may_put_read_and_list_saves_to_a_new_url(proxy: FaultyProxy, bucket: str) -> None:
    """No object is put twice either, as in a bucket whose objects stay as they were written."""
    url, cut = f"s3://{bucket}/run", on_grid("w", (4, 4), (1, 1))
    put: set[str] = set()

    def write_once(request: Request) -> Fault:
        if request.method == "DELETE" or (request.method == "PUT" and request.path in put):
            return DENIED
        put.update([request.path] if request.method == "PUT" else [])
        return NONE

    with proxy.faulty(write_once):
        for name, overwrite in (("one", False), ("two", True)):
            dist_ckpt_strategies.save(
                state_of(0, [cut]), f"{url}/{name}", FORMAT2, overwrite=overwrite
            )
        dist_ckpt_strategies.save_async(state_of(0, [cut]), f"{url}/three", FORMAT2).wait()
        with pytest.raises(StoreAccessError, match=r"one/metadata\.json.*to delete.*DeleteObject"):
            dist_ckpt_strategies.save(state_of(0, [cut]), f"{url}/one", FORMAT2, overwrite=True)

    for name in ("one", "two", "three"):
        loaded: Any = dist_ckpt_strategies.load(state_of(0, [cut], no_data), f"{url}/{name}")
        assert differences(0, [cut], loaded) == []


def test_a_load_of_a_part_asks_for_little_more_than_it_needs(
    proxy: FaultyProxy, bucket: str
) -> None:
    """A column quarter of a matrix of 16 MiB."""
    url = f"s3://{bucket}/run"
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2048, 2048))}
    dist_ckpt_strategies.save(state, url, FORMAT2)
    proxy.requests.clear()

    quarter = ShardedTensor.from_rank_offsets("w", torch.ones(2048, 512), (1, 1, 4))
    loaded: Any = dist_ckpt_strategies.load({"w": quarter}, url)

    assert not loaded["w"].any()
    of_chunks = [r for r in proxy.requests if "/arrays/" in r.path]
    assert sum(r.nbytes for r in of_chunks) <= 1.1 * 4 * 2048 * 512
    of_manifest = Counter(r.path for r in proxy.requests if "/manifest/part" in r.path)
    assert list(of_manifest.values()) == [1]


def write_and_read(bucket: Bucket, region: Region, options: Options) -> None:
    """Write an array of 64 inner chunks of 1 MiB in two objects, and read a part of it."""
    array = ArraySpec("w", (64, 512, 512), DType.FLOAT32, (32, 512, 512), inner_shape=(1, 512, 512))
    values = random_values(array.shape, array.dtype)
    writer = BucketWriter(bucket, options)
    writer.begin_creates([array]).wait(30)
    writer.begin_writes([ArrayWrite(array, Region.whole(array.shape), values)]).wait(60)
    writer.begin_syncs([array]).wait(30)
    digests = {i: ChunkRecord.of(0, found) for (_, i), found in writer.digests.items()}
    reader = BucketReader(bucket, options, lambda _: ArrayRecord(array, digests))
    target = random_values(region.shape, array.dtype, seed=1)
    reader.begin_reads([ArrayRead(array, region, target)]).wait(60)
    assert target.tobytes() == values[region.slices()].tobytes()


@pytest.mark.parametrize("max_inflight_bytes", [1 << 20, 512 << 20])
def test_inner_chunks_that_follow_each_other_are_read_in_requests_of_some_mib(
    proxy: FaultyProxy, bucket: str, max_inflight_bytes: int
) -> None:
    place = located(f"s3://{bucket}/run", Options(store=StoreOptions(proxy.store.endpoint)))
    assert isinstance(place, Bucket)

    write_and_read(
        place,
        Region((3, 0, 0), (50, 512, 512)),
        Options(max_inflight_bytes=max_inflight_bytes),
    )

    reads = [r for r in proxy.requests if r.method == "GET" and "/arrays/" in r.path]
    assert len(reads) == 4 + 3
    wanted = 50 << 20
    assert wanted <= sum(r.nbytes for r in reads) <= wanted + (16 * 32 + 4)
    puts = [r for r in proxy.requests if r.method == "PUT" and "/arrays/w/c." in r.path]
    assert len(puts) == 2


def test_a_large_tensor_goes_in_several_objects(proxy: FaultyProxy, bucket: str) -> None:
    rows = math.ceil(2.5 * MAX_OBJECT_NBYTES / (1 << 20))
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(rows, 1 << 20, dtype=torch.int8))}

    dist_ckpt_strategies.save(state, f"s3://{bucket}/run", FORMAT2)

    sizes = [r.nbytes for r in proxy.requests if r.method == "PUT" and "/arrays/w/c." in r.path]
    assert len(sizes) >= 3
    assert max(sizes) <= MAX_OBJECT_NBYTES + (4 << 20)
    part = torch.zeros(3, 1 << 20, dtype=torch.int8)
    wanted = ShardedTensor("w", part, part.dtype, (3, 1 << 20), (rows, 1 << 20), (62, 0), None)
    loaded: Any = dist_ckpt_strategies.load({"w": wanted}, f"s3://{bucket}/run")
    assert loaded["w"].all()
