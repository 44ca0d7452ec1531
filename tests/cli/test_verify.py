"""``dist-ckpt inspect`` and ``verify`` of format 1: lists for people, JSON for programs, every sort
of damage.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner, Result

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
    write_foreign_checkpoint,
    write_metadata,
    write_object,
)


def run(*args: str | Path) -> Result:
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.stderr == ""
    return result


def json_of(*args: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json").stdout)
    return found


def test_keys_are_chosen_by_a_glob_and_objects_can_be_left_out(written: Path) -> None:
    text = run("inspect", written, "--keys", "*/bias").stdout
    assert "model/layers/0/bias" in text
    assert WEIGHT not in text
    assert RNG not in text
    assert "arrays      4 in 10 files" in text
    assert RNG not in run("inspect", written, "--no-objects").stdout
    assert json_of("inspect", written, "--keys", "*_state", "--no-objects")["objects"] == []

    nothing = CliRunner().invoke(app, ["inspect", str(written), "--keys", "encoder.*", "--json"])
    assert (nothing.exit_code, nothing.stdout) == (2, "")
    assert "none of its 6 keys matches 'encoder.*'" in nothing.stderr


def test_the_json_of_inspect(written: Path) -> None:
    found = json_of("inspect", written)

    assert (found["schema"], found["command"], found["path"]) == (2, "inspect", str(written))
    assert found["complete"] is True
    assert found["marker"] == {
        "sharded_backend": "zarr",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = (written / "common.pt").stat().st_size
    assert found["common"] == {"path": "common.pt", "nbytes": common}
    assert (found["num_arrays"], found["num_objects"]) == (4, 2)
    files = [path for path in written.rglob("*") if path.is_file()]
    assert found["num_files"] == len(files)
    assert found["nbytes"] == sum(path.stat().st_size for path in files)
    assert found["stale_files"] == found["issues"] == []
    assert found["arrays"][0] == {
        "key": WEIGHT,
        "shape": [4, 6],
        "dtype": "float32",
        "chunk_shape": [2, 2],
        "separator": ".",
        "raw": True,
        "nbytes": 96,
        "num_chunks": 6,
        "num_chunks_expected": 6,
        "file_nbytes": 96,
    }
    assert found["objects"][1] == {
        "key": RNG,
        "shape": [2, 2],
        "num_shards": 4,
        "num_shards_expected": 4,
        "file_nbytes": sum(path.stat().st_size for path in (written / RNG).iterdir()),
        "writers": [],
    }


def test_an_incomplete_checkpoint_is_shown_as_such(checkpoint: Path) -> None:
    (checkpoint / WEIGHT / "1.2").unlink()
    (checkpoint / RNG / "shard_0.0_2.2.pt").unlink()
    (checkpoint / "common.pt").unlink()
    (checkpoint / "metadata.json").unlink()

    text = run("inspect", checkpoint).stdout

    assert "5 of 6" in text
    assert "3 of 4" in text
    assert "backend     unknown" in text
    assert "common.pt   missing" in text
    assert "complete    NO, 4 issues; `dist-ckpt verify` lists them all" in text
    assert "metadata.json: expected the last file that a save writes, found no file" in text
    found = json_of("inspect", checkpoint)
    assert (found["complete"], found["marker"], found["common"]) == (False, None, None)
    assert [one["problem"] for one in found["issues"]] == [
        "missing_marker",
        *["missing_file"] * 3,
    ]


def test_another_backend_is_described_by_its_marker(tmp_path: Path) -> None:
    root = write_foreign_checkpoint(tmp_path / "ckpt")

    text = run("inspect", root).stdout
    assert "backend     torch_dist 1; common state: torch 1" in text
    assert "in all      5 files" in text
    assert "complete    not known; dist-ckpt looks into zarr 1 and zarr 2 only" in text
    found = json_of("inspect", root)
    assert found["complete"] is None
    assert [finding["problem"] for finding in found["issues"]] == ["unknown_backend"]

    verified = run("verify", root).stdout
    assert "expected sharded backend zarr version 1, found torch_dist version 1" in verified
    assert "cannot be verified: another backend wrote it" in verified
    assert json_of("verify", root)["whole"] is None


def test_no_name_steers_the_terminal_or_is_taken_for_markup(checkpoint: Path) -> None:
    (checkpoint / WEIGHT).rename(checkpoint / "a\x1b[31m[red]b\nc")

    assert "a\\x1b[31m[red]b\\nc" in run("inspect", checkpoint).stdout
    keys = {array["key"] for array in json_of("inspect", checkpoint)["arrays"]}
    assert "a\x1b[31m[red]b\nc" in keys


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_that_may_not_be_listed_is_not_called_damaged(
    command: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any = ".") -> Any:
        if Path(path) == checkpoint:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)  # root, as which tests may run, is refused nothing
    result = CliRunner().invoke(app, [command, str(checkpoint)])

    assert result.exit_code == 3
    assert "cannot be listed: Permission denied" in result.output.replace("\n", "")


Damage = Callable[[Path], object]
GOLDEN = golden_archives()


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
    root = unpack(GOLDEN[name], tmp_path)
    assert issues_of(root) == []
    assert {one["kind"] for one in json_of("inspect", root)["stale_files"]} <= {"locks"}


def write_packed(root: Path, *damaged: str) -> None:
    """A compressed array, of whose chunks some are empty."""
    array = zarr.create_array(
        str(root / "packed"), shape=(4, 4), chunks=(2, 2), dtype="f4", zarr_format=2
    )
    array[...] = np.ones((4, 4), np.float32)
    for name in damaged:
        (root / "packed" / name).write_bytes(b"")


def write_huge(shape: list[int], root: Path) -> None:
    """An array of one element to a chunk."""
    write_metadata(root / "huge", shape=shape, chunks=[1] * len(shape))


def write_older(root: Path, *numbers: int) -> None:
    """An object of the older form, which ends at the largest offset."""
    for number in numbers:
        write_object(root / "older" / f"shard_0.{number}_1.pt", number)


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
    "an empty compressed chunk": (
        lambda root: write_packed(root, "0.1"),
        [("wrong_size", "packed", "packed/0.1")],
    ),
    "whole compressed chunks": (write_packed, []),
    "a missing shard of the older form": (
        lambda root: write_older(root, 0, 2),
        [("missing_file", "older", "older/shard_0.1_1.pt")],
    ),
    "all shards of the older form": (lambda root: write_older(root, 0, 1, 2), []),
    **{
        f"a shape beyond all bounds, {shape}": (
            partial(write_huge, shape),
            [("missing_file", "huge", "huge")],
        )
        for shape in ([10**15], [10**6, 10**6], [10**30])
    },
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_nothing_else(checkpoint: Path, name: str) -> None:
    damage, expected = DAMAGES[name]
    damage(checkpoint)

    assert issues_of(checkpoint) == expected
    is_unfinished = any(problem == "missing_marker" for problem, _, _ in expected)
    assert json_of("inspect", checkpoint)["unfinished"] is is_unfinished


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
