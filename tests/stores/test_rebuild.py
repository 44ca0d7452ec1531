"""The index of packs is made anew in object stores."""

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import StorageError
from tests.cli.commands import json_of, run
from tests.stores.commands import ONE_SERVER
from tests.support.folders import Folder


def state(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((5, 3), value)), "value": value}


@ONE_SERVER
def test_the_newest_whole_save_counts(in_bucket: Folder) -> None:
    place, url = in_bucket, f"{in_bucket.address}/iter"
    saves: list[dict[str, bytes]] = []
    for value in (1.0, 2.0):
        dist_ckpt_strategies.save(state(value), url, ("safetensors", 1), overwrite=True)
        saves.append({name: place.read(name) for name in place.names() if "/packs/" in name})
    for name, content in saves[0].items():
        place.put(name, content)
    place.delete("iter/index")
    with pytest.raises(StorageError, match=r"index"):
        dist_ckpt_strategies.load(state(0.0), url)

    assert json_of("rebuild-index", url, code=0)["num_packs"] == 1
    loaded: Any = dist_ckpt_strategies.load(state(0.0), url)
    assert loaded["value"] == 2.0

    (name,) = saves[1]
    place.put(name, saves[1][name][:-1])
    assert len(json_of("rebuild-index", url, code=0)["passed_over"]) == 1
    loaded = dist_ckpt_strategies.load(state(0.0), url)
    assert (loaded["value"], loaded["w"].unique().tolist()) == (1.0, [1.0])

    place.put(*next((n, c[:-1]) for n, c in saves[0].items()))
    result = run("rebuild-index", url)
    assert (result.exit_code, "no save is whole" in result.stderr) == (1, True)
