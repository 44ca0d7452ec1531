"""``dist-ckpt verify`` of format 1: what is there, and every sort of damage."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from dist_ckpt_strategies.cli.app import app
from tests.support.checkpoints import (
    ARRAYS,
    EMPTY,
    NESTED,
    RNG,
    SCALAR,
    WEIGHT,
    flip_bit,
    golden_archives,
    unpack,
    write_checkpoint,
    write_metadata,
    write_object,
)

Damage = Callable[[Path], object]
GOLDEN = golden_archives()


def json_of(command: str, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        CliRunner().invoke(app, [command, str(root), "--json"]).stdout
    )
    return found


def issues_of(root: Path) -> list[tuple[str, str | None, str]]:
    return [(i["problem"], i["key"], i["path"]) for i in json_of("verify", root)["issues"]]


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of a file."""
    path.unlink()
    make(path)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", GOLDEN)
def test_what_megatron_wrote_has_no_issues(tmp_path: Path, name: str) -> None:
    assert issues_of(unpack(GOLDEN[name], tmp_path)) == []


def test_locks_of_the_old_backend_are_stale_files_and_no_arrays(tmp_path: Path) -> None:
    found = json_of("inspect", unpack(GOLDEN["m0153_tp2pp2dp2_flat"], tmp_path))

    assert {stale["kind"] for stale in found["stale_files"]} == {"locks"}
    assert len(found["stale_files"]) == 51
    assert len(found["arrays"]) == 68
    assert sum(stored["num_chunks"] for stored in found["arrays"]) == 380
    assert [stored["num_shards"] for stored in found["objects"]] == [4] * 5


DAMAGES: dict[str, tuple[Damage, list[tuple[str, str | None, str]]]] = {
    "a missing chunk": (
        lambda root: (root / WEIGHT / "1.2").unlink(),
        [("missing_file", WEIGHT, f"{WEIGHT}/1.2")],
    ),
    "a truncated chunk": (
        lambda root: (root / WEIGHT / "0.1").write_bytes(b"\1" * 15),
        [("wrong_size", WEIGHT, f"{WEIGHT}/0.1")],
    ),
    "chunks outside of the grid": (
        lambda root: [
            shutil.copy(root / WEIGHT / "0.0", root / WEIGHT / name)
            for name in ("2.0", "0", "01.0")
        ],
        [("unexpected_file", WEIGHT, f"{WEIGHT}/{name}") for name in ("0", "01.0", "2.0")],
    ),
    "a chunk of an empty array": (
        lambda root: (root / EMPTY / "0.0").write_bytes(b""),
        [("unexpected_file", EMPTY, f"{EMPTY}/0.0")],
    ),
    "missing metadata": (
        lambda root: (root / NESTED / ".zarray").unlink(),
        [("missing_file", NESTED, f"{NESTED}/.zarray")],
    ),
    "truncated metadata": (
        lambda root: (root / WEIGHT / ".zarray").write_bytes(b'{"shape": [4, 6]'),
        [("damaged", WEIGHT, f"{WEIGHT}/.zarray")],
    ),
    "metadata of nothing that torch knows": (
        lambda root: write_metadata(root / WEIGHT, dtype="|O"),
        [("damaged", WEIGHT, f"{WEIGHT}/.zarray")],
    ),
    "a missing shard of an object": (
        lambda root: (root / RNG / "shard_1.0_2.2.pt").unlink(),
        [("missing_file", RNG, f"{RNG}/shard_1.0_2.2.pt")],
    ),
    "a shard outside of the grid": (
        lambda root: shutil.copy(root / RNG / "shard_0.0_2.2.pt", root / RNG / "shard_0.2_2.2.pt"),
        [("unexpected_file", RNG, f"{RNG}/shard_0.2_2.2.pt")],
    ),
    "a shard of another grid": (
        lambda root: shutil.copy(root / RNG / "shard_0.0_2.2.pt", root / RNG / "shard_0.0_1.2.pt"),
        [("missing_file", RNG, f"{RNG}/shard_0.1_1.2.pt")],
    ),
    "a flipped bit in an object": (
        lambda root: flip_bit(root / RNG / "shard_1.1_2.2.pt", b"state"),
        [("damaged", RNG, f"{RNG}/shard_1.1_2.2.pt")],
    ),
    "a directory in the place of an object": (
        lambda root: replace(root / WEIGHT / "shard_0_1.pt", Path.mkdir),
        [("unreadable", WEIGHT, f"{WEIGHT}/shard_0_1.pt")],
    ),
    "a link in a circle in the place of an object": (
        lambda root: replace(root / WEIGHT / "shard_0_1.pt", link_to_itself),
        [("unreadable", WEIGHT, f"{WEIGHT}/shard_0_1.pt")],
    ),
    "a pipe in the place of a chunk": (
        lambda root: replace(root / SCALAR / "0", os.mkfifo),
        [("missing_file", SCALAR, f"{SCALAR}/0")],
    ),
    "a pipe in the place of the marker": (
        lambda root: replace(root / "metadata.json", os.mkfifo),
        [("unreadable", None, "metadata.json")],
    ),
    "missing common state": (
        lambda root: (root / "common.pt").unlink(),
        [("missing_file", None, "common.pt")],
    ),
    "a missing marker": (
        lambda root: (root / "metadata.json").unlink(),
        [("missing_marker", None, "metadata.json")],
    ),
    "garbage for a marker": (
        lambda root: (root / "metadata.json").write_bytes(b"\xff\xfe"),
        [("damaged", None, "metadata.json")],
    ),
    "a marker of an unknown common backend": (
        lambda root: (root / "metadata.json").write_text(
            '{"sharded_backend": "zarr", "common_backend": "msgpack"}'
        ),
        [("unknown_backend", None, "metadata.json")],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_nothing_else(checkpoint: Path, name: str) -> None:
    damage, expected = DAMAGES[name]
    damage(checkpoint)

    assert issues_of(checkpoint) == expected
    is_unfinished = expected[0][0] == "missing_marker"
    assert json_of("inspect", checkpoint)["unfinished"] is is_unfinished


def test_compressed_chunks_need_only_hold_something(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    array = zarr.create_array(
        str(root / "packed"), shape=(4, 4), chunks=(2, 2), dtype="f4", zarr_format=2
    )
    array[...] = np.ones((4, 4), np.float32)
    assert issues_of(root) == []

    (root / "packed" / "0.1").write_bytes(b"")
    (root / "packed" / "1.1").unlink()

    assert issues_of(root) == [
        ("wrong_size", "packed", "packed/0.1"),
        ("missing_file", "packed", "packed/1.1"),
    ]


def test_chunks_may_lie_in_numbered_directories(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    write_metadata(root / "deep", shape=[2, 4], chunks=[1, 4], dimension_separator="/")
    for index in range(2):
        (root / "deep" / str(index)).mkdir()
        (root / "deep" / str(index) / "0").write_bytes(b"\1" * 16)

    found = json_of("inspect", root)
    assert found["issues"] == []
    assert found["num_files"] == sum(path.is_file() for path in root.rglob("*"))

    (root / "deep" / "1" / "0").rename(root / "deep" / "1" / "1")
    assert issues_of(root) == [
        ("missing_file", "deep", "deep/1/0"),
        ("unexpected_file", "deep", "deep/1/1"),
    ]

    (root / "deep" / ".zarray").unlink()
    assert issues_of(root) == [
        ("missing_file", "deep", "deep/.zarray"),
    ]


def test_objects_of_the_older_form_end_at_the_largest_offset(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    for number in range(3):
        write_object(root / "older" / f"shard_0.{number}_1.pt", number)
    assert issues_of(root) == []

    (root / "older" / "shard_0.1_1.pt").unlink()
    assert issues_of(root) == [("missing_file", "older", "older/shard_0.1_1.pt")]


def test_what_a_killed_save_left_is_listed_and_harmless(checkpoint: Path) -> None:
    (checkpoint / ".partial-0123").write_bytes(b"12")
    (checkpoint / WEIGHT / "0.0_61722fe5c975a722.__lock").write_bytes(b"123")
    (checkpoint / WEIGHT / "0.6172.partial").write_bytes(b"1234")
    (checkpoint / ".removed-w").mkdir()
    (checkpoint / ".removed-w" / "0.0").write_bytes(b"12345")

    assert issues_of(checkpoint) == []
    found = json_of("inspect", checkpoint)["stale_files"]
    assert [(one["kind"], one["path"], one["nbytes"]) for one in found] == [
        ("partial", ".partial-0123", 2),
        ("removed", ".removed-w", 5),
        ("partial", f"{WEIGHT}/0.0_61722fe5c975a722.__lock", 3),
        ("partial", f"{WEIGHT}/0.6172.partial", 4),
    ]


@pytest.mark.parametrize("shape", [[10**15], [10**6, 10**6], [10**30]])
def test_a_shape_beyond_all_bounds_takes_neither_time_nor_memory(
    checkpoint: Path, shape: list[int]
) -> None:
    write_metadata(checkpoint / "huge", shape=shape, chunks=[1] * len(shape))

    assert issues_of(checkpoint) == [("missing_file", "huge", "huge")]


def test_an_array_may_be_a_link_and_links_in_circles_end(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / WEIGHT).rename(tmp_path / "elsewhere")
    (checkpoint / WEIGHT).symlink_to(tmp_path / "elsewhere")
    (checkpoint / "circle").symlink_to(checkpoint)
    (checkpoint / "model" / "circle").symlink_to(checkpoint / "model")
    (checkpoint / "broken").symlink_to(tmp_path / "nowhere")

    assert issues_of(checkpoint) == []
    assert [stored["key"] for stored in json_of("inspect", checkpoint)["arrays"]] == ARRAYS

    (tmp_path / "elsewhere" / "0.0").unlink()
    assert issues_of(checkpoint) == [("missing_file", WEIGHT, f"{WEIGHT}/0.0")]
