"""``dist-ckpt verify``: status 0 for a whole checkpoint, else 1 and a list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from dist_ckpt_strategies.cli.app import app
from tests.support.checkpoints import (
    RNG,
    WEIGHT,
    flip_bit,
    golden_archives,
    unpack,
    write_foreign_checkpoint,
    write_metadata,
)

LAST_FILE = "expected the last file that a save writes"
FITTING = "expected an archive that fits its own checksums"
MISMATCH = "checksum mismatch in its record archive/data.pkl"


def verified(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, args)])


def json_of(*args: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(verified(*args, "--json").stdout)
    return found


def test_a_whole_checkpoint_ends_with_status_0(written: Path) -> None:
    result = verified(written)

    assert result.exit_code == 0
    assert f"{written} is whole\n" in result.stdout
    assert "checked: 4 arrays in 10 chunk files, 2 objects and common.pt in 6 files" in (
        result.stdout
    )
    assert result.stderr == ""


def test_a_checkpoint_that_megatron_wrote_is_whole(tmp_path: Path) -> None:
    result = verified(unpack(golden_archives()["m0123_tp4_modelonly"], tmp_path))

    assert result.exit_code == 0
    assert "checked: 17 arrays in 163 chunk files, 5 objects and common.pt in 21 files" in (
        result.stdout
    )


def test_damage_is_listed_below_its_key_and_ends_with_status_1(checkpoint: Path) -> None:
    (checkpoint / WEIGHT / "1.2").unlink()
    (checkpoint / WEIGHT / "0.0").write_bytes(b"\1")
    flip_bit(checkpoint / RNG / "shard_1.1_2.2.pt", b"state")
    (checkpoint / "metadata.json").unlink()

    result = verified(checkpoint)

    assert result.exit_code == 1
    assert result.stdout.splitlines()[:-1] == [
        "the checkpoint",
        f"  missing marker     metadata.json: {LAST_FILE}, found no file",
        WEIGHT,
        "  wrong size         0.0: expected 16 bytes, found 1 byte",
        "  missing file       1.2: expected 16 bytes, found no file",
        RNG,
        f"  damaged            shard_1.1_2.2.pt: {FITTING}, found {MISMATCH}",
        f"{checkpoint} is NOT whole: 4 issues in 3 places",
    ]


def test_the_json_lists_the_same(checkpoint: Path) -> None:
    (checkpoint / WEIGHT / "1.2").unlink()
    (checkpoint / "common.pt").unlink()

    found = json_of(checkpoint)

    assert found["schema"] == 1
    assert found["command"] == "verify"
    assert found["path"] == str(checkpoint)
    assert found["whole"] is False
    assert found["findings"] == [
        {
            "problem": "missing_file",
            "key": None,
            "path": "common.pt",
            "expected": "the state that all ranks share",
            "found": "no file",
        },
        {
            "problem": "missing_file",
            "key": WEIGHT,
            "path": f"{WEIGHT}/1.2",
            "expected": "16 bytes",
            "found": "no file",
        },
    ]
    assert found["common"] is None
    assert (found["num_arrays"], found["num_objects"]) == (4, 2)
    assert len(found) == 12


def test_the_json_of_a_whole_checkpoint_has_no_findings(written: Path) -> None:
    found = json_of(written)

    assert found["whole"] is True
    assert found["findings"] == []


def test_a_long_list_is_cut_short_for_people_only(checkpoint: Path) -> None:
    write_metadata(checkpoint / "long", shape=[50], chunks=[1])

    result = verified(checkpoint)

    assert result.stdout.count("missing file") == 20
    assert "... and 30 more; --json lists them" in result.stdout
    assert "is NOT whole: 50 issues in 1 place\n" in result.stdout
    assert len(json_of(checkpoint)["findings"]) == 50


def test_another_backend_cannot_be_verified(tmp_path: Path) -> None:
    root = write_foreign_checkpoint(tmp_path / "ckpt")

    result = verified(root)

    assert result.exit_code == 3
    assert "expected sharded backend zarr version 1, found torch_dist version 1" in result.stdout
    assert "cannot be verified: another backend wrote it" in result.stdout
    assert "NOT whole" not in result.stdout
    assert json_of(root)["whole"] is None


def test_no_checkpoint_is_an_error_of_one_line(tmp_path: Path) -> None:
    result = verified(tmp_path / "nowhere", "--json")

    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr == f"error: checkpoint directory {tmp_path / 'nowhere'} does not exist\n"
