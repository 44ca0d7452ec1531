"""Whatever happens to a file of a checkpoint, a load returns what was saved, or names the file."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.strategies.zarr import Format2LoadShardedStrategy
from tests.stores.commands import PACK, Files, cuts, problems
from tests.support.entries import Failure, outcome
from tests.support.sharding import differences, no_data, state_of

UNREAD = {"zarr.json", "save.json"}
"""For readers without our code, and for saves."""

pytestmark = pytest.mark.parametrize("files", ["directory", "moto"], indirect=True)


def load(files: Files, verify: str, *keys: str) -> Any:
    """What comes back otherwise than it was saved, or the Failure."""
    wanted = [cut for cut in cuts() if not keys or cut.key in keys]
    asked = {} if keys else {"o": ShardedObject("o", None, (1,), (0,))}
    strategy = Format2LoadShardedStrategy(verify=verify)

    def wrong() -> list[str]:
        state = state_of(0, wanted, no_data) | asked
        loaded: Any = dist_ckpt_strategies.load(state, files.address, strategy)
        found = differences(0, wanted, loaded)
        is_right = loaded["iteration"] == 3
        if asked:
            is_right &= loaded["o"]["t"].tolist() == [1, 1, 1]
        return found if is_right else [*found, "objects"]

    return outcome(wrong)


def require_named(found: Any, name: str) -> None:
    assert isinstance(found, Failure), (name, found)
    assert StorageError.__name__ in found.kinds
    assert name in found.text, (name, found)


def test_a_flipped_cut_lengthened_or_missing_file_is_named_by_loads_and_verify(
    files: Files,
) -> None:
    names = [n for n in files.inner.names() if n.rpartition("/")[2] not in UNREAD]
    names.remove("metadata.json")
    assert len(names) == 6, names
    for name in names:
        content = files.inner.read(name)
        at = len(content) // 3
        flipped = content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]
        for changed in (flipped, content[: len(content) // 2], b"", content + b"x"):
            files.inner.put(name, changed)
            assert problems(files.address).keys() == {name}
            if name == PACK and changed == content + b"x":
                assert load(files, "read") == []  # objects are found by where they begin and end
                require_named(load(files, "full"), name)
            else:
                require_named(load(files, "read"), name)
        files.inner.delete(name)
        assert problems(files.address) == {name: {"missing_file"}}
        require_named(load(files, "read"), name)
        files.inner.put(name, content)
    assert problems(files.address) == {}
    assert load(files, "full") == []


def test_a_full_verification_looks_at_what_the_load_does_not_ask_for(files: Files) -> None:
    assert load(files, "full", "v") == []
    for name in ("arrays/w/c.0.0", "arrays/w/zarr.json"):
        content = files.inner.read(name)
        for changed in (content[:-3] + bytes([content[-3] ^ 1]) + content[-2:], content[:-1]):
            files.inner.put(name, changed)
            assert load(files, "read", "v") == []
            require_named(load(files, "full", "v"), name)
        files.inner.put(name, content)
