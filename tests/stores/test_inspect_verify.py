"""``dist-ckpt inspect`` and ``verify`` of format 2, in a directory and in object stores alike."""

from __future__ import annotations

import json

import pytest

from dist_ckpt_strategies.formats.manifest import digest_of
from tests.stores.commands import (
    CHUNK,
    INDEX,
    PACK,
    Files,
    json_of,
    problems,
    run,
    write,
)
from tests.support.object_stores import ObjectStore

ONE_SERVER = pytest.mark.parametrize("files", ["directory", "moto"], indirect=True)
BOTH_COMMANDS = pytest.mark.parametrize("command", ["inspect", "verify"])


def flip(files: Files, name: str, *places: int) -> None:
    content = bytearray(files.inner.read(name))
    for place in places:
        content[place] ^= 1
    files.inner.put(name, bytes(content))


def test_inspect_shows_what_the_manifest_says(files: Files) -> None:
    is_directory = files.is_directory
    files.top.put("notes.txt", b"mine")
    files.inner.put("arrays/.partial-0", b"x")

    lines = run("inspect", files.address).stdout.splitlines()

    titles = ["array", "shape", "dtype", "chunk", "inner", "files", "size", "writers"]
    assert lines[0].split() == titles
    assert lines[1].split()[:4] == ["v", "300x200", "float32", "300x200"]
    assert any(line.split() == ["plain", "1", "1", "in", "manifest", "0"] for line in lines)
    shown = {line[:12].strip(): line[12:] for line in lines if line[:12].strip()}
    assert shown["checkpoint"] == files.address
    assert shown["beside it"] == "notes.txt"
    how = "yes, by names and sizes; " if is_directory else "yes, by names; "
    assert shown["complete"].startswith(how)
    found = json_of("inspect", files.address, "--keys", "w*")
    assert (found["path"], found["complete"], found["unfinished"]) == (files.address, True, False)
    assert (found["num_arrays"], found["num_objects"], found["objects"]) == (2, 2, [])
    assert (found["layout"], found["others"]) == ({"ranks": 1}, ["notes.txt"])
    assert [stale["path"] for stale in found["stale_files"]] == ["arrays/.partial-0"]
    assert found["begun"]["seconds"] > 1e9
    (array,) = found["arrays"]
    assert (array["key"], array["writers"]) == ("w", [0])
    assert array["file_nbytes"] == len(files.inner.read(CHUNK))
    names = {*files.inner.names()} - {"notes.txt"}
    assert found["num_files"] == len(names)
    if not is_directory:  # sizes are those that the manifest lists
        names -= {"metadata.json", INDEX, "manifest/save.json", "arrays/.partial-0"}
    assert found["nbytes"] == sum(len(files.inner.read(name)) for name in names)


def test_a_whole_checkpoint_verifies(files: Files) -> None:
    result = run("verify", f"{files.address}/")

    assert result.exit_code == 0, result.stderr
    assert f"{files.address} is whole\n" in result.stdout
    assert "2 arrays, 2 objects and common.pt; 10 files" in result.stdout
    found = json_of("verify", files.address)
    assert found["whole"] is True
    assert found["bytes_per_second"] > 0


@ONE_SERVER
def test_verify_lists_all_damage_not_just_the_first(files: Files) -> None:
    flip(files, CHUNK, 5, -1)
    flip(files, "arrays/w/zarr.json", 20)
    flip(files, PACK, 40)
    flip(files, "common.pt", 40)
    files.inner.delete("arrays/v/c.0.0")
    files.inner.put("arrays/stray", b"x")
    files.inner.put("metadata.json", b"{}")

    assert problems(files.address) == {
        CHUNK: {"damaged"},
        "arrays/w/zarr.json": {"damaged"},
        PACK: {"damaged"},
        "common.pt": {"damaged"},
        "arrays/v/c.0.0": {"missing_file"},
        "arrays/stray": {"unexpected_file"},
        "metadata.json": {"damaged"},
    }
    result = run("verify", files.address)
    assert result.exit_code == 1
    assert "is NOT whole: 8 issues in 7 files" in result.stdout
    lines = result.stdout.splitlines()
    of_chunk = [line.partition("expected ")[2] for line in lines if CHUNK in line]
    assert [text.partition(" with")[0] for text in of_chunk] == ["inner chunk 0", "its index"]
    assert all("(chunk (0, 0), written by rank 0)" in text for text in of_chunk)
    assert "(written by rank 0)" in next(line for line in lines if PACK in line)


@ONE_SERVER
def test_a_marker_of_another_backend_and_a_manifest_of_a_later_version_are_named(
    files: Files,
) -> None:
    marker = files.inner.read("metadata.json")
    files.inner.put("metadata.json", marker.replace(b'"zarr"', b'"torch_dist"'))
    assert problems(files.address) == {"metadata.json": {"unknown_backend"}}

    files.inner.put("metadata.json", marker)
    rest = files.inner.read(INDEX)[len('{"digest":"') + 32 :].replace(
        b'"version": 1', b'"version": 9'
    )
    files.inner.put(INDEX, b'{"digest":"' + digest_of(rest).encode() + rest)
    result = run("verify", files.address)
    assert result.exit_code == 3
    assert "schema dist_ckpt_strategies.manifest 9" in result.stderr


@BOTH_COMMANDS
def test_an_unfinished_save_is_reported_with_its_start(files: Files, command: str) -> None:
    host = json.loads(files.inner.read("manifest/save.json"))["host"]
    files.unmark()

    result = run(command, files.address)

    assert result.exit_code == 1
    assert f"UTC on {host}, has not ended, or was killed" in result.stdout
    files.inner.delete(INDEX)
    assert run(command, files.address).exit_code == 1


@BOTH_COMMANDS
def test_what_is_missing_or_no_checkpoint_is_distinguished(
    environment: ObjectStore, bucket: str, command: str
) -> None:
    write(f"s3://{bucket}/run/iter_0000003")
    environment.put(bucket, "other/x", b"x")

    for address, said in {
        f"s3://{bucket}/ru": "there is no checkpoint",
        f"s3://{bucket}/run": "is no checkpoint, but holds 1 (iter_0000003)",
        f"s3://{bucket}/other": "no checkpoint of format ('zarr', 2)",
        "s3://not-there/run": "no bucket 'not-there'",
        "ftp://host/run": "expected s3://bucket/path",
    }.items():
        result = run(command, address)
        assert result.exit_code == (2 if address.startswith("ftp:") else 3), address
        assert said in result.stderr, (address, result.stderr)
        assert result.stderr.count("\n") == 1
