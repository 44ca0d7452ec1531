"""Format ("zarr", 2): whatever is saved comes back bit for bit in any layout, or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from tests.support.formats import load_format2, save_format2

import dist_ckpt_strategies
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.formats.checkpoints import Format2Checkpoint
from dist_ckpt_strategies.formats.locations import read_marker
from dist_ckpt_strategies.formats.manifest import digest_of
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.sharded.async_save import SaveCache
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import Format2LoadShardedStrategy
from tests.support.entries import Entry, Failure, load, outcome, prepare, save
from tests.support.ranks import run_processes
from tests.support.sharding import (
    differences,
    no_data,
    on_grid,
    state_of,
    zeros,
)

pytestmark = pytest.mark.multiprocess

FORMAT2 = ("zarr", 2)


def objects_of(rank: int) -> dict[str, Any]:
    """One object of each kind that is stored in another way."""
    values = {
        "nothing": None,
        "plain": {"rank": rank, "nested": [1, 2.5, "text", True]},
        "tuple": (rank, 2),
        "tensors": {"t": torch.arange(5) + rank},
        "large": list(range(3000)),
        "not.a.number": float("nan"),
    }
    return {
        name: ShardedObject(f"o.{name}", value, (4,), (rank,)) for name, value in values.items()
    }


def save_and_load_objects(rank: int, root: Path) -> list[str]:
    prepare(60)
    wrong = []
    for entry in Entry:
        state = objects_of(rank) | {"iteration": 7}
        save(entry, state, root / entry, sharded_strategy=FORMAT2)
        wanted = {
            name: ShardedObject(f"o.{name}", None, (4,), (rank,)) for name in objects_of(rank)
        }
        two_stage = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD)
        for how in ({}, {"sharded_strategy": two_stage}):
            loaded = load(entry, wanted, root / entry, **how)
            for name, expected in objects_of(rank).items():
                if repr(loaded[name]) != repr(expected.data):
                    wrong.append(f"{entry} {how}: {name}: {loaded[name]}")
            if loaded["iteration"] != 7:
                wrong.append("iteration")
    return wrong


def test_objects_and_common_state_come_back(tmp_path: Path) -> None:
    assert run_processes(4, save_and_load_objects, tmp_path) == [[]] * 4
    index = json.loads((tmp_path / "ours" / "manifest" / "index.json").read_bytes())
    common = (tmp_path / "ours" / "common.pt").read_bytes()
    assert index["common"] == [len(common), digest_of(common)]
    assert index["layout"] == {"ranks": 4}
    assert index["versions"]["torch"].startswith("2.")
    packs = sorted((tmp_path / "ours" / "objects").iterdir())
    assert [pack.name for pack in packs] == [f"rank-0000{n}.bin" for n in range(4)]


def test_damage_anywhere_is_found_and_named(tmp_path: Path) -> None:
    """A byte of every file, and what loading then says."""
    root = tmp_path / "c"
    cuts = [on_grid("w", (64, 32), (1, 1)), on_grid("b", (7,), (1,))]
    options = Options(timeout_s=60)
    comm = Communicator()
    objects = {"o": ShardedObject("o", {"t": torch.ones(3)}, (1,), (0,))}
    root.mkdir()
    (root / "common.pt").write_bytes(dump_object({"iteration": 1}, name="common"))
    save_format2(state_of(0, cuts) | objects, root, comm, options, SaveCache())
    wanted = {"o": ShardedObject("o", None, (1,), (0,))}

    def read() -> None:
        Format2Checkpoint(root, options).common_content()
        load_format2(state_of(0, cuts, no_data) | wanted, root, comm, options)

    read()
    checked = [
        p for p in root.rglob("*") if p.is_file() and p.name not in {"zarr.json", "save.json"}
    ]
    assert len(checked) == 6
    for path in checked:
        content = path.read_bytes()
        for damaged in (flipped(content), content[:-1], content + b"x", None):
            if path.suffix == ".bin" and damaged == content + b"x":
                continue  # objects are found by where they begin and end
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            with pytest.raises(StorageError) as found:
                read()
            assert str(path) in str(found.value)
        path.write_bytes(content)
    read()


def flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(content) // 3] ^= 0x04
    return bytes(changed)


def load_verified(rank: int, root: Path, verify: str) -> Any:
    """Load one of two arrays; the other is damaged."""
    prepare(60)
    strategy = Format2LoadShardedStrategy(verify=verify)
    cut = on_grid("good", (8, 4), (4, 1))
    return outcome(
        lambda: differences(
            rank,
            [cut],
            load(Entry.OURS, state_of(rank, [cut], zeros), root, sharded_strategy=strategy),
        )
    )


def save_two(rank: int, root: Path) -> None:
    prepare(60)
    cuts = [on_grid(key, (8, 4), (4, 1)) for key in ("bad", "good")]
    save(Entry.OURS, state_of(rank, cuts), root, sharded_strategy=FORMAT2)


@pytest.mark.parametrize("name", ["c.2.0", "zarr.json"])
def test_a_full_check_finds_what_is_not_read(name: str, tmp_path: Path) -> None:
    run_processes(4, save_two, tmp_path / "c")
    path = tmp_path / "c" / "arrays" / "bad" / name
    path.write_bytes(flipped(path.read_bytes()))

    assert run_processes(4, load_verified, tmp_path / "c", "read") == [[]] * 4
    for found in run_processes(4, load_verified, tmp_path / "c", "full"):
        assert isinstance(found, Failure)
        assert str(path) in found.text


def test_load_is_told_what_to_verify(tmp_path: Path) -> None:
    cuts = {key: on_grid(key, (8, 4), (1, 1)) for key in ("bad", "good")}
    for version in (1, 2):
        root = tmp_path / str(version)
        dist_ckpt_strategies.save(state_of(0, cuts.values()), root, ("zarr", version))
    path = tmp_path / "2" / "arrays" / "bad" / "c.0.0"
    path.write_bytes(flipped(path.read_bytes()))

    def loaded(version: int, key: str, verify: str | None) -> list[str]:
        wanted = state_of(0, [cuts[key]], no_data)
        found: Any = dist_ckpt_strategies.load(wanted, tmp_path / str(version), verify=verify)
        return differences(0, [cuts[key]], found)

    assert loaded(2, "bad", "off") == ["bad #0"]
    assert loaded(2, "good", None) == loaded(2, "good", "read") == []
    for key, verify in (("bad", None), ("bad", "read"), ("bad", "full"), ("good", "full")):
        with pytest.raises(CorruptCheckpointError, match=re.escape(str(path))):
            loaded(2, key, verify)
    with pytest.raises(StrategyError, match="verify: expected one of off, read, full, found 'all'"):
        loaded(2, "good", "all")
    for verify in ("off", "full"):
        with pytest.raises(StrategyError, match=r"format \('zarr', 2\), which ZarrLoad"):
            loaded(1, "good", verify)


def replace_format_1_by_the_default(rank: int, root: Path) -> Any:
    prepare(60)
    cuts, found = [on_grid("w", (8, 4), (4, 1))], []
    for choice in (("zarr", 1), None, ("zarr", 1)):
        dist_ckpt_strategies.save(state_of(rank, cuts), root, choice, overwrite=True)
        marker = read_marker(root)
        loaded: Any = dist_ckpt_strategies.load(state_of(rank, cuts, no_data), root)
        found.append((marker.sharded_backend_version, differences(rank, cuts, loaded)))
    return found


def test_the_default_is_format_2_and_either_format_replaces_the_other(tmp_path: Path) -> None:
    for found in run_processes(4, replace_format_1_by_the_default, tmp_path / "c"):
        assert found == [(1, []), (2, []), (1, [])]


def test_a_folder_of_somebody_else_is_still_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "manifest").mkdir()
    (tmp_path / "manifest" / "of_a_ship.txt").write_bytes(b"tea")

    with pytest.raises(CheckpointExistsError, match="manifest is not of a checkpoint"):
        dist_ckpt_strategies.save({"iteration": 3}, tmp_path, FORMAT2, overwrite=True)

    assert (tmp_path / "manifest" / "of_a_ship.txt").read_bytes() == b"tea"
