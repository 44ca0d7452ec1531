"""``convert``, ``upgrade`` and ``diff`` where one of the two, or both, are in object stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from dist_ckpt_strategies import ConvertOptions, convert, diff
from dist_ckpt_strategies.errors import (
    BucketNotFoundError,
    CheckpointExistsError,
    IncompatibleVersionError,
    StrategyError,
)
from tests.stores.commands import run, write
from tests.support.object_stores import ObjectStore
from tests.support.sharding import Cut, differences, no_data, on_grid, state_of

ONE_SERVER = pytest.mark.parametrize("store", ["moto"], indirect=True)
SMALL_BLOCKS = ConvertOptions(max_memory_bytes=1, num_threads=2)
"""Blocks of 64 KiB."""


def cuts() -> list[Cut]:
    """Arrays of one chunk: one of it is larger than a block, one is a scalar, one is empty."""
    return [
        on_grid("large", (300, 200), (1, 1)),
        on_grid("a/b", (7,), (1,), dtype=torch.bfloat16),
        on_grid("scalar", (), ()),
    ]


def save(place: str | Path, backend: tuple[str, int]) -> None:
    values: dict[str, Any] = {"t": {"t": torch.arange(5)}, "plain": [1, 2.5], "big": "x" * 9000}
    objects = {key: ShardedObject(key, value, (1,), (0,)) for key, value in values.items()}
    dist_ckpt_strategies.save(state_of(0, cuts()) | objects | {"iteration": 7}, place, backend)


def differing(place: str | Path) -> list[str]:
    """Names of what a load gives otherwise than ``save`` had it."""
    asked = {key: ShardedObject(key, None, (1,), (0,)) for key in ("t", "plain", "big")}
    loaded: Any = dist_ckpt_strategies.load(state_of(0, cuts(), no_data) | asked, place)
    assert loaded["t"]["t"].tolist() == [0, 1, 2, 3, 4]
    assert (loaded["plain"], loaded["big"], loaded["iteration"]) == ([1, 2.5], "x" * 9000, 7)
    return differences(0, cuts(), loaded)


@pytest.mark.parametrize("backend", [("zarr", 1), ("zarr", 2)])
def test_a_checkpoint_goes_to_a_store_and_back(
    environment: ObjectStore, bucket: str, tmp_path: Path, backend: tuple[str, int]
) -> None:
    save(tmp_path / "source", backend)
    url, back, again = f"s3://{bucket}/run", tmp_path / "back", f"s3://{bucket}/again"
    seen: list[tuple[int, int]] = []

    there = convert(
        tmp_path / "source",
        url,
        "zarr@2",
        options=SMALL_BLOCKS,
        watch=lambda done, total: seen.append((done, total)),
    )
    convert(url, back, f"zarr@{backend[1]}", options=SMALL_BLOCKS)
    convert(url, again, "zarr@2", options=SMALL_BLOCKS)

    for place in (url, back, again):
        assert differing(place) == []
        assert diff(tmp_path / "source", place, options=SMALL_BLOCKS).is_equal
    assert diff(again, url).is_equal
    assert max(seen) == (there.nbytes, there.nbytes)
    names = environment.names(bucket)
    place = environment.place(bucket, "run")
    chunks = [name for name in names if name.startswith(f"{place}/arrays/large/c.")]
    assert len(chunks) > 3  # of 64 KiB, where the array has 240 kB
    assert max(len(environment.read(bucket, name)) for name in chunks) < (64 << 10) + 4096
    assert run("verify", url).exit_code == 0


@ONE_SERVER
def test_other_formats_do_not_go_to_a_store_and_say_so(
    environment: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    save(tmp_path / "one", ("zarr", 1))
    url = write(f"s3://{bucket}/run")

    for to in ("zarr@1", "torch_dist", "safetensors"):
        with pytest.raises(StrategyError, match=rf"s3://{bucket}/x: .*{to} needs a directory"):
            convert(tmp_path / "one", f"s3://{bucket}/x", to)
        with pytest.raises(StrategyError, match="file system"):
            convert(url, f"s3://{bucket}/x", to)
    with pytest.raises(StrategyError, match="needs a directory"):
        dist_ckpt_strategies.upgrade(tmp_path / "one", f"s3://{bucket}/x")
    assert not [name for name in environment.names(bucket) if name.startswith("x")]

    for name in environment.names(bucket):
        environment.delete(bucket, name)
    environment.put(bucket, "run/manifest/index.json", b"{}")
    environment.put(
        bucket, "run/metadata.json", b'{"sharded_backend":"torch_dist","common_backend":"torch"}'
    )
    with pytest.raises(IncompatibleVersionError, match="read from an object store"):
        diff(url, tmp_path / "one")


@ONE_SERVER
def test_a_target_that_is_taken_or_the_source_itself_is_refused(
    environment: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    url = write(f"s3://{bucket}/run")
    environment.put(bucket, "other/x", b"x")
    other = write(f"s3://{bucket}/run-2")

    with pytest.raises(CheckpointExistsError, match="a finished checkpoint"):
        convert(other, url, "zarr@2")
    with pytest.raises(CheckpointExistsError, match="files of something else"):
        convert(url, f"s3://{bucket}/other", "zarr@2")
    with pytest.raises(BucketNotFoundError):
        convert(url, "s3://not-there/run", "zarr@2")
    for target in (url, f"{url}/inner", f"s3://{bucket}"):
        with pytest.raises(StrategyError, match="beside the source"):
            convert(url, target, "zarr@2")
    convert(url, f"{url}-3", "zarr@2")
    assert diff(url, f"{url}-3").is_equal
