"""Whatever happens to an object of a checkpoint, a load returns what was saved, or names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CorruptCheckpointError, StorageError
from dist_ckpt_strategies.strategies.zarr import Format2LoadShardedStrategy
from tests.stores.commands import PACK, cuts, write
from tests.support.entries import Failure, outcome
from tests.support.object_stores import ObjectStore
from tests.support.sharding import differences, no_data, state_of

UNREAD = {"zarr.json", "save.json"}
"""For readers without our code, and for saves."""


def require_exact_or_named(url: str, name: str) -> bool:
    """Whether loading gave what was saved; else the error has named the object."""
    asked = {"o": ShardedObject("o", None, (1,), (0,))}
    state = state_of(0, cuts(), no_data) | asked
    loaded: Any = outcome(lambda: dist_ckpt_strategies.load(state, url))
    if isinstance(loaded, Failure):
        assert StorageError.__name__ in loaded.kinds
        assert name in loaded.text, (name, loaded)
        return False
    assert differences(0, cuts(), loaded) == []
    assert loaded["iteration"] == 3
    assert loaded["o"]["t"].tolist() == [1, 1, 1]
    return True


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place % len(content)] ^= 0x10
    return bytes(changed)


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_flipped_cut_lengthened_or_missing_object_is_named(
    environment: ObjectStore, bucket: str
) -> None:
    url = f"s3://{bucket}/run"
    write(url)
    place = environment.place(bucket)
    names = [n for n in environment.names(bucket) if n.rpartition("/")[2] not in UNREAD]
    names.remove("run/metadata.json")
    assert len(names) == 7, names
    for name in names:
        content = environment.read(bucket, name)
        below = name.removeprefix(f"{place}/")
        is_pack = below.startswith("objects/")
        changes = {
            "flipped": flipped(content, len(content) // 3),
            "cut": content[: len(content) // 2],
            "emptied": b"",
            "lengthened": content + b"x",
        }
        for what, changed in changes.items():
            environment.put(bucket, name, changed)
            is_exact = require_exact_or_named(url, name)
            assert is_exact == (is_pack and what == "lengthened"), (name, what)
        environment.delete(bucket, name)
        assert not require_exact_or_named(url, name), name
        environment.put(bucket, name, content)
    assert require_exact_or_named(url, "")


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_full_verification_looks_at_what_the_load_does_not_ask_for(
    environment: ObjectStore, bucket: str
) -> None:
    url = f"s3://{bucket}/run"
    write(url)
    wanted = [cut for cut in cuts() if cut.key == "v"]
    full = Format2LoadShardedStrategy(verify="full")
    dist_ckpt_strategies.load(state_of(0, wanted, no_data), url, full)
    for below in ("arrays/w/c.0.0", "arrays/w/zarr.json"):
        name = f"{environment.place(bucket)}/{below}"
        content = environment.read(bucket, name)
        for changed in (flipped(content, len(content) - 3), content[:-1]):
            environment.put(bucket, name, changed)
            dist_ckpt_strategies.load(state_of(0, wanted, no_data), url)
            with pytest.raises(CorruptCheckpointError, match=f"s3://{bucket}/{name}"):
                dist_ckpt_strategies.load(state_of(0, wanted, no_data), url, full)
        environment.put(bucket, name, content)


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_full_verification_finds_bytes_behind_the_last_object(
    environment: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    """In a store and in a directory alike."""
    url = f"s3://{bucket}/run"
    full = Format2LoadShardedStrategy(verify="full")
    for place in (url, str(tmp_path / "run")):
        write(place)
        dist_ckpt_strategies.load(state_of(0, cuts(), no_data), place, full)
    name = f"{environment.place(bucket)}/{PACK}"
    environment.put(bucket, name, environment.read(bucket, name) + b"x")
    with (tmp_path / "run" / PACK).open("ab") as file:
        file.write(b"x")

    for place in (url, str(tmp_path / "run")):
        with pytest.raises(
            CorruptCheckpointError, match=f"{place}/.*{PACK}.*expected [0-9]+ bytes of objects"
        ):
            dist_ckpt_strategies.load(state_of(0, cuts(), no_data), place, full)
