"""``gs://`` goes through TensorStore's driver for Google Cloud Storage; a stand-in answers it."""

import os
from typing import Any

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreAccessError,
)
from tests.stores.commands import differing
from tests.support.entries import Failure, outcome
from tests.support.gcs import fake_gcs
from tests.support.ranks import run_processes
from tests.support.sharding import on_grid, state_of

SIZE = 2
SAVED = [on_grid("w", (64, 32), (2, 1), size=SIZE), on_grid("a/b", (8, 4), (1, 2), size=SIZE)]
WANTED = [on_grid("w", (64, 32), (1, 2), size=SIZE), on_grid("a/b", (8, 4), (2, 1), size=SIZE)]


def load(rank: int, variables: dict[str, str], url: str = "gs://there/run") -> Any:
    os.environ.update(variables)
    return outcome(lambda: differing(url, WANTED, rank=rank))


def save_and_load(rank: int, variables: dict[str, str]) -> list[Any]:
    os.environ.update(variables)

    def save(url: str) -> None:
        dist_ckpt_strategies.save(state_of(rank, SAVED), url, overwrite=True)

    found = []
    for _ in range(2):
        save("gs://there/run")
        found.append(load(rank, {}))
    found += [load(rank, {}, url) for url in ("gs://there/other", "gs://not-there/run")]
    return [*found, outcome(lambda: save("gs://not-there/run"))]


def test_a_checkpoint_makes_a_round_trip_and_missing_things_are_distinguished() -> None:
    with fake_gcs("there") as (variables, buckets):
        for saved, again, nothing, nowhere, unsaved in run_processes(
            SIZE, save_and_load, variables
        ):
            assert saved == again == []
            assert CheckpointNotFoundError.__name__ in nothing.kinds, nothing
            assert CheckpointNotFoundError.__name__ in nowhere.kinds, nowhere
            assert "no bucket 'not-there'" in nowhere.text
            assert StoreAccessError.__name__ in unsaved.kinds, unsaved
            assert "no bucket 'not-there'" in unsaved.text

        without = variables | {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "another"}
        (refused,) = run_processes(1, load, without)
        assert StoreAccessError.__name__ in refused.kinds, refused

        (name,) = [n for n in buckets["there"] if "/packs/" in n][:1]
        content = buckets["there"][name]
        buckets["there"][name] = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
        for damaged in run_processes(SIZE, load, variables):
            assert isinstance(damaged, Failure)
            assert CorruptCheckpointError.__name__ in damaged.kinds
            assert f"gs://there/{name}" in damaged.text
