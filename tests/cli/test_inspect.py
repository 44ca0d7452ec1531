"""``dist-ckpt inspect`` and ``verify`` of format 1: lists for people, JSON for programs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dist_ckpt_strategies.cli.app import app
from tests.support.checkpoints import (
    ARRAYS,
    OBJECTS,
    RNG,
    WEIGHT,
    flip_bit,
    write_foreign_checkpoint,
)

LAST_FILE = "expected the last file that a save writes"
FITTING = "expected an archive that fits its own checksums"
MISMATCH = "checksum mismatch in its record archive/data.pkl"


def run(*args: str | Path) -> Result:
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.stderr == ""
    return result


def json_of(*args: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json").stdout)
    return found


def row(text: str, key: str) -> list[str]:
    """The texts beside a key."""
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [key])
    return line.split()[1:]


def test_every_array_and_object_has_a_line(written: Path) -> None:
    arrays, objects, summary = run("inspect", written).stdout.split("\n\n")

    assert row(arrays, "array") == ["shape", "dtype", "chunk", "files", "size"]
    assert row(arrays, WEIGHT) == ["4x6", "float32", "2x2", "6", "96", "B"]
    assert row(arrays, "scale") == ["scalar", "float64", "scalar", "1", "8", "B"]
    assert row(arrays, "unused") == ["0x4", "int64", "1x4", "0", "0", "B"]
    assert [line.split()[0] for line in arrays.splitlines()[1:]] == ARRAYS
    assert row(objects, RNG)[:2] == ["2x2", "4"]
    assert [line.split()[0] for line in objects.splitlines()[1:]] == OBJECTS
    assert str(written) in summary


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


def test_damage_is_listed_below_its_key(checkpoint: Path) -> None:
    (checkpoint / WEIGHT / "1.2").unlink()
    (checkpoint / WEIGHT / "0.0").write_bytes(b"\1")
    flip_bit(checkpoint / RNG / "shard_1.1_2.2.pt", b"state")
    (checkpoint / "metadata.json").unlink()

    assert run("verify", checkpoint).stdout.splitlines()[:-1] == [
        "the checkpoint",
        f"  missing marker     metadata.json: {LAST_FILE}, found no file",
        WEIGHT,
        "  wrong size         0.0: expected 16 bytes, found 1 byte",
        "  missing file       1.2: expected 16 bytes, found no file",
        RNG,
        f"  damaged            shard_1.1_2.2.pt: {FITTING}, found {MISMATCH}",
        f"{checkpoint} is NOT whole: 4 issues in 4 files",
    ]
    found = json_of("verify", checkpoint)
    assert (found["command"], found["whole"]) == ("verify", False)
    assert found["issues"][2] == {
        "problem": "missing_file",
        "key": WEIGHT,
        "path": f"{WEIGHT}/1.2",
        "expected": "16 bytes",
        "found": "no file",
    }


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
