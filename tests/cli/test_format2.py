"""``dist-ckpt inspect`` and ``verify`` of format 2: the manifest, and every digest it lists."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.formats.manifest import digest_of
from tests.support.checkpoints import copied, flip_at
from tests.support.format2_checkpoints import LARGE, PLAIN, SMALL, write_format2

CHUNK = f"arrays/{LARGE}/c.0.0"
PACK = "objects/rank-00000.bin"
PART = "manifest/part-00000.json"
INDEX = "manifest/index.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint, not to be changed."""
    return write_format2(tmp_path_factory.mktemp("whole") / "iter_0000100")


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A whole checkpoint, to be damaged."""
    return copied(written, tmp_path / "iter_0000100")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, args)))


def json_of(*args: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json").stdout)
    return found


def problems(root: Path) -> dict[str, set[str]]:
    """What verify finds, by file."""
    found: dict[str, set[str]] = {}
    for finding in json_of("verify", root)["findings"]:
        found.setdefault(finding["path"], set()).add(finding["problem"])
    return found


def test_inspect_shows_what_the_manifest_says(written: Path) -> None:
    lines = run("inspect", written).stdout.splitlines()

    titles = ["array", "shape", "dtype", "chunk", "inner", "files", "size", "writers"]
    assert lines[0].split() == titles
    assert lines[1].split() == [SMALL, "7", "bfloat16", "7", "7", "1", "34", "B", "0"]
    assert lines[2].split()[:6] == [LARGE, "512x512", "float32", "512x512", "128x256", "1"]
    assert any(line.split() == [PLAIN, "1", "1", "in", "manifest", "0"] for line in lines)


def test_the_json_of_inspect_has_the_facts(written: Path) -> None:
    found = json_of("inspect", written, "--keys", "dec*")

    (array,) = found["arrays"]
    assert (array["key"], array["inner_shape"], array["writers"]) == (LARGE, [128, 256], [0])
    assert found["objects"] == []
    assert (found["complete"], found["unfinished"], found["layout"]) == (True, False, {"ranks": 1})
    assert (found["num_arrays"], found["num_objects"]) == (2, 2)
    assert found["begun"]["seconds"] > 1e9


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_unfinished_save_is_told_as_such_with_its_begin(command: str, tmp_path: Path) -> None:
    root = write_format2(tmp_path / "iter_0000001", is_finished=False)
    host = json.loads((root / "manifest/save.json").read_bytes())["host"]

    result = run(command, root)

    assert result.exit_code == 1
    assert f"UTC on {host}, has not ended, or was killed" in result.stdout


def test_a_whole_checkpoint_is_verified(written: Path) -> None:
    result = run("verify", written)

    assert result.exit_code == 0
    assert f"{written} is whole\n" in result.stdout
    assert "2 arrays, 2 objects and common.pt; 10 files" in result.stdout
    assert json_of("verify", written)["bytes_per_second"] > 0


def test_verify_lists_all_damage_not_just_the_first(checkpoint: Path) -> None:
    size = (checkpoint / CHUNK).stat().st_size
    for byte_offset in (0, 300_000, size - 1):
        flip_at(checkpoint / CHUNK, byte_offset)
    (checkpoint / f"arrays/{SMALL}/c.0").unlink()
    flip_at(checkpoint / f"arrays/{SMALL}/zarr.json", 20)
    flip_at(checkpoint / PACK, 40)
    flip_at(checkpoint / "common.pt", 40)
    (checkpoint / "arrays/stray").write_bytes(b"x")
    (checkpoint / "metadata.json").write_text("{}")

    result = run("verify", checkpoint)

    assert result.exit_code == 1
    assert problems(checkpoint) == {
        CHUNK: {"damaged"},
        f"arrays/{SMALL}/c.0": {"missing_file"},
        f"arrays/{SMALL}/zarr.json": {"damaged"},
        PACK: {"damaged"},
        "common.pt": {"damaged"},
        "arrays/stray": {"unexpected_file"},
        "metadata.json": {"damaged"},
    }
    assert "is NOT whole: 9 issues in 7 files" in result.stdout
    of_chunk = [line for line in result.stdout.splitlines() if CHUNK in line]
    assert [line.partition("expected ")[2].partition(" with")[0] for line in of_chunk] == [
        "inner chunk 0",
        "inner chunk 2",
        "its index",
    ]
    assert all("(chunk (0, 0), written by rank 0)" in line for line in of_chunk)
    assert "(written by rank 0)" in next(
        line for line in result.stdout.splitlines() if PACK in line
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (CHUNK, "wrong_size"),
        (PACK, "wrong_size"),
        ("common.pt", "wrong_size"),
        (INDEX, "damaged"),
        (PART, "damaged"),
        ("metadata.json", "damaged"),
    ],
)
@pytest.mark.parametrize("change", [b"x", b""])
def test_a_file_of_another_size_is_found(
    name: str, problem: str, change: bytes, checkpoint: Path
) -> None:
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content + change if change else content[:-1])

    assert problems(checkpoint)[name] == {problem}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (f"arrays/{LARGE}/zarr.json", "missing_file"),
        (PACK, "missing_file"),
        ("common.pt", "missing_file"),
        (INDEX, "missing_file"),
        (PART, "missing_file"),
    ],
)
def test_a_missing_file_is_found(name: str, problem: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()

    assert problems(checkpoint) == {name: {problem}}


def test_a_marker_of_another_backend_is_found(checkpoint: Path) -> None:
    marker = checkpoint / "metadata.json"
    marker.write_text(marker.read_text().replace('"zarr"', '"torch_dist"'))

    assert problems(checkpoint) == {"metadata.json": {"unknown_backend"}}


def test_files_beside_the_checkpoint_are_no_damage(checkpoint: Path) -> None:
    (checkpoint / "train_dataloader.pt").write_bytes(b"x")
    (checkpoint / "arrays" / ".partial-0").write_bytes(b"x")

    found = json_of("verify", checkpoint)

    assert (found["whole"], found["others"]) == (True, ["train_dataloader.pt"])
    assert [leftover["path"] for leftover in found["leftovers"]] == ["arrays/.partial-0"]


def test_a_manifest_of_a_later_version_is_refused_by_name(checkpoint: Path) -> None:
    path = checkpoint / INDEX
    rest = path.read_bytes()[len('{"digest":"') + 32 :].replace(b'"version": 1', b'"version": 9')
    path.write_bytes(b'{"digest":"' + digest_of(rest).encode() + rest)

    result = run("verify", checkpoint)

    assert result.exit_code == 3
    assert "schema dist_ckpt_strategies.manifest 9" in result.stderr


def test_what_cannot_be_read_is_a_finding(checkpoint: Path) -> None:
    (checkpoint / CHUNK).unlink()
    (checkpoint / CHUNK).mkdir()
    shutil.rmtree(checkpoint / "objects")

    assert problems(checkpoint) == {CHUNK: {"missing_file"}, PACK: {"missing_file"}}


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_manifest_that_may_not_be_looked_into_is_named(
    command: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.parent.name == "manifest":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)  # root, as which tests may run, is refused nothing
    result = run(command, checkpoint)
    assert result.exit_code == 3
    assert f"{checkpoint / 'manifest'}: permission denied" in result.output.replace("\n", "")
    assert "unexpected" not in result.output
