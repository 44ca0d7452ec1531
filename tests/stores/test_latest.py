"""The newest of the checkpoints that a bucket holds."""

from __future__ import annotations

from typing import Any

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import NoUsableCheckpointError
from dist_ckpt_strategies.recovery import Loaded, load_latest
from tests.support.object_stores import ObjectStore
from tests.support.sharding import differences, no_data, on_grid, state_of

pytestmark = [
    pytest.mark.parametrize("store", ["moto"], indirect=True),
]

CUT = on_grid("w", (4, 4), (1, 1))


def save(url: str) -> None:
    dist_ckpt_strategies.save(state_of(0, [CUT]), url, ("zarr", 2))


def load(*places: str) -> Loaded:
    def load_one(url: Any) -> Any:
        assert isinstance(url, str)
        return dist_ckpt_strategies.load(state_of(0, [CUT], no_data), url)

    return load_latest(None, places, load_one)


def test_the_newest_that_is_whole_is_loaded(environment: ObjectStore, bucket: str) -> None:
    root = f"s3://{bucket}/run"
    for iteration in (8, 12, 100):
        save(f"{root}/iter_{iteration:07d}")
    environment.put(bucket, "run/iter_0000200/manifest/save.json", b"{}")
    place = environment.place(bucket, "run/iter_0000100")
    environment.delete(bucket, f"{place}/manifest/index.json")

    found = load(f"{root}/")

    assert (found.iteration, found.name) == (12, f"{root}/iter_0000012")
    assert differences(0, [CUT], found.state) == []
    assert [one.iteration for one in found.attempts] == [200, 100]
    assert [one.is_unfinished for one in found.attempts] == [True, False]
    assert load(f"{root}/iter_0000008").iteration == 8
    with pytest.raises(NoUsableCheckpointError, match=r"iter_0000100\): "):
        load(f"{root}/iter_0000100", f"{root}/iter_0000200")
