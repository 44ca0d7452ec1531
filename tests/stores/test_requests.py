"""What is asked of an object store: few requests, plain ones, no more bytes than needed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.core.chunk_grids import MAX_OBJECT_NBYTES
from dist_ckpt_strategies.errors import StoreAccessError, StoreUnreachableError
from tests.support.faulty_proxy import DENIED, NONE, Fault, FaultyProxy, Request
from tests.support.object_stores import ObjectStore
from tests.support.sharding import differences, no_data, on_grid, state_of

pytestmark = [
    pytest.mark.parametrize("store", ["moto"], indirect=True),
]

FORMAT2 = ("zarr", 2)
LATE_S = 4.0


@pytest.fixture
def proxy(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, for this process."""
    with FaultyProxy(store) as found:
        for name, value in found.store.variables.items():
            monkeypatch.setenv(name, value)
        yield found


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
        with pytest.raises(StoreAccessError, match=r"one/metadata\.json.*to put"):
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
    assert len(of_chunks) <= 8
    of_manifest = Counter(r.path for r in proxy.requests if "/manifest/part" in r.path)
    assert list(of_manifest.values()) == [1]


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


@pytest.mark.parametrize(
    ("name", "generation"),
    [("/arrays/w/c.0.0", 1), ("/manifest/index.json", 0), ("/run/metadata.json", 1)],
)
def test_a_late_request_of_a_failed_save_does_not_change_the_next_one(
    proxy: FaultyProxy,
    bucket: str,
    name: str,
    generation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A put is given up, another save succeeds, then the server carries the put out."""
    url = f"s3://{bucket}/run"
    late: list[str] = []

    def save(value: float) -> None:
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((8, 4), value))}
        dist_ckpt_strategies.save(state, url, FORMAT2, overwrite=True)

    def loaded() -> list[float]:
        wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8, 4))}
        found: Any = dist_ckpt_strategies.load(wanted, url)
        return sorted(found["w"].unique().tolist())

    def decide(request: Request) -> Fault:
        if request.method != "PUT" or not request.path.endswith(name):
            return NONE
        late.append(request.path)
        return Fault(delay_s=LATE_S)

    if generation:
        save(0.0)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "2")
    with proxy.faulty(decide), pytest.raises(StoreUnreachableError):
        save(1.0)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "60")
    if generation:
        assert loaded() == [0.0]
    save(2.0)
    assert loaded() == [2.0]
    time.sleep(LATE_S)
    assert late
    assert loaded() == [2.0]
