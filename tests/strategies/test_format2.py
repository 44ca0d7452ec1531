"""Format ("zarr", 2): whatever is saved comes back bit for bit in any layout, or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    StrategyError,
)
from tests.support.entries import prepare
from tests.support.ranks import run_processes
from tests.support.sharding import (
    differences,
    no_data,
    on_grid,
    state_of,
)

pytestmark = pytest.mark.multiprocess

FORMAT2 = ("zarr", 2)


def flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(content) // 3] ^= 0x04
    return bytes(changed)


def test_load_takes_what_to_verify(tmp_path: Path) -> None:
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
    path.write_bytes(flipped(path.read_bytes()))
    path = path.with_name("zarr.json")
    path.write_bytes(flipped(path.read_bytes()))
    assert loaded(2, "bad", "read") == []
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(path))):
        loaded(2, "good", "full")
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
        marker = json.loads((root / "metadata.json").read_text())
        loaded: Any = dist_ckpt_strategies.load(state_of(rank, cuts, no_data), root)
        found.append((marker["sharded_backend_version"], differences(rank, cuts, loaded)))
    return found


def test_the_default_is_format_2_and_either_format_replaces_the_other(tmp_path: Path) -> None:
    for found in run_processes(4, replace_format_1_by_the_default, tmp_path / "c"):
        assert found == [(1, []), (2, []), (1, [])]


def test_a_folder_of_somebody_else_is_still_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "manifest").mkdir()
    (tmp_path / "manifest" / "of_a_ship.txt").write_bytes(b"tea")

    with pytest.raises(CheckpointExistsError, match="manifest is not part of a checkpoint"):
        dist_ckpt_strategies.save({"iteration": 3}, tmp_path, FORMAT2, overwrite=True)

    assert (tmp_path / "manifest" / "of_a_ship.txt").read_bytes() == b"tea"
