"""What commands and loads say of changed files of format 2, in directories and in stores."""

import json
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.formats.manifest import digest_of
from dist_ckpt_strategies.strategies.zarr import Format2LoadShardedStrategy
from tests.cli.commands import json_of, run
from tests.stores.commands import CHUNK, INDEX, PACK, Files, cuts, differing, problems, write
from tests.support.checkpoints import contents
from tests.support.entries import outcome, require_failure
from tests.support.folders import Folder
from tests.support.sharding import differences, no_data, state_of

ONE_SERVER = pytest.mark.parametrize("place", ["directory", "moto"], indirect=True)
BOTH_COMMANDS = pytest.mark.parametrize("command", ["inspect", "verify"])


def test_inspect_shows_what_the_manifest_says(files: Files) -> None:
    files.top.put("notes.txt", b"mine")
    files.inner.put("arrays/.partial-0", b"x")

    lines = run("inspect", files.address).stdout.splitlines()

    assert lines[1].split()[:4] == ["v", "300x200", "float32", "300x200"]
    shown = {line[:12].strip(): line[12:] for line in lines if line[:12].strip()}
    assert (shown["checkpoint"], shown["beside it"]) == (files.address, "notes.txt")
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
    if files.address.startswith("s3:"):  # sizes are those that the manifest lists
        names -= {"metadata.json", INDEX, "manifest/save.json", "arrays/.partial-0"}
    assert found["nbytes"] == sum(len(files.inner.read(name)) for name in names)


@ONE_SERVER
def test_verify_lists_all_damage_not_just_the_first(files: Files) -> None:
    assert json_of("verify", f"{files.address}/")["whole"] is True
    files.flip(CHUNK, 5, -1)
    for name in ("arrays/w/zarr.json", PACK, "common.pt"):
        files.flip(name)
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
    lines = result.stdout.splitlines()
    of_chunk = [line.partition("expected ")[2] for line in lines if CHUNK in line]
    assert [text.partition(" with")[0] for text in of_chunk] == ["inner chunk 0", "its index"]
    assert all("(chunk (0, 0), written by rank 0)" in text for text in of_chunk)
    assert "(written by rank 0)" in next(line for line in lines if PACK in line)


def test_a_directory_that_is_copied_into_a_bucket_is_a_checkpoint_there(
    in_bucket: Folder, tmp_path: Path
) -> None:
    for name, content in contents(Path(write(str(tmp_path / "c")))).items():
        in_bucket.put(name, content)
    url = in_bucket.address
    assert (differing(url, cuts()), problems(url)) == ([], {})

    in_bucket.delete(CHUNK)
    in_bucket.put("arrays/stray", b"x")
    assert problems(url) == {CHUNK: {"missing_file"}, "arrays/stray": {"unexpected_file"}}


@ONE_SERVER
def test_a_marker_of_another_backend_and_a_manifest_of_a_later_version_are_named(
    files: Files,
) -> None:
    marker = files.inner.read("metadata.json")
    files.inner.put("metadata.json", marker.replace(b'"zarr"', b'"torch_dist"'))
    assert problems(files.address) == {"metadata.json": {"unknown_backend"}}

    files.inner.put("metadata.json", marker)
    rest = files.inner.read(INDEX)[len('{"digest":"') + 32 :]
    rest = rest.replace(b'"version": 1', b'"version": 9')
    files.inner.put(INDEX, b'{"digest":"' + digest_of(rest).encode() + rest)
    result = run("verify", files.address)
    assert result.exit_code == 3
    assert "schema dist_ckpt_strategies.manifest 9" in result.stderr


@BOTH_COMMANDS
def test_an_unfinished_save_is_reported_with_its_start(files: Files, command: str) -> None:
    host = json.loads(files.inner.read("manifest/save.json"))["host"]
    files.top.delete("metadata.json")

    result = run(command, files.address)

    assert result.exit_code == 1
    assert f"UTC on {host}, has not ended, or was killed" in result.stdout
    files.inner.delete(INDEX)
    assert run(command, files.address).exit_code == 1


@BOTH_COMMANDS
def test_a_missing_checkpoint_and_other_files_give_different_errors(
    in_bucket: Folder, command: str
) -> None:
    root = in_bucket.address
    write(f"{root}/job/iter_0000003")
    in_bucket.put("other/x", b"x")

    for address, said in {
        f"{root}/jo": "there is no checkpoint",
        f"{root}/job": "is no checkpoint: it holds 1 checkpoint (iter_0000003)",
        f"{root}/other": "no checkpoint of format ('zarr', 2)",
        "s3://not-there/run": "no bucket 'not-there'",
        "ftp://host/run": "expected s3://bucket/path",
    }.items():
        result = run(command, address)
        assert result.exit_code == (2 if address.startswith("ftp:") else 3), address
        assert said in result.stderr, (address, result.stderr)
        assert result.stderr.count("\n") == 1


UNREAD = {"zarr.json", "save.json", "metadata.json"}
"""For readers without our code, for saves, and the marker, of which loads notice not all."""


def load(files: Files, verify: str, *keys: str) -> Any:
    """What comes back otherwise than it was saved, or the Failure."""
    wanted = [cut for cut in cuts() if not keys or cut.key in keys]
    asked = {} if keys else {"o": ShardedObject("o", None, (1,), (0,))}
    strategy = Format2LoadShardedStrategy(verify=verify)

    def wrong() -> list[str]:
        state = state_of(0, wanted, no_data) | asked
        loaded: Any = dist_ckpt_strategies.load(state, files.address, strategy)
        assert loaded["iteration"] == 3
        assert not asked or loaded["o"]["t"].tolist() == [1, 1, 1]
        return differences(0, wanted, loaded)

    return outcome(wrong)


@ONE_SERVER
def test_a_flipped_cut_lengthened_or_missing_file_is_named_by_loads_and_verify(
    files: Files,
) -> None:
    names = [n for n in files.inner.names() if n.rpartition("/")[2] not in UNREAD]
    assert len(names) == 6, names
    for name in names:
        content = files.inner.read(name)
        for changed in (None, content[: len(content) // 2], b"", content + b"x"):
            if changed is None:
                files.flip(name)
            else:
                files.inner.put(name, changed)
            assert problems(files.address).keys() == {name}
            if name == PACK and changed == content + b"x":
                assert load(files, "read") == []  # objects are found by where they begin and end
            else:
                said = name
                if changed and name == CHUNK:
                    said += f" has {len(changed)} bytes, expected {len(content)}"
                require_failure(load(files, "read"), StorageError, said)
        files.inner.delete(name)
        assert problems(files.address) == {name: {"missing_file"}}
        require_failure(load(files, "read"), StorageError, name)
        files.inner.put(name, content)
    assert problems(files.address) == {}
    assert load(files, "read") == []


@ONE_SERVER
def test_a_load_compares_what_it_reads_or_nothing(files: Files) -> None:
    for name in (CHUNK, "arrays/w/zarr.json"):
        content = files.inner.read(name)
        files.inner.put(name, content[:-1])
        for _ in range(2):
            assert load(files, "read", "v") == []
            files.inner.put(name, content)
            files.flip(name)
        files.inner.put(name, content)
    files.flip(CHUNK, 9)
    assert load(files, "off", "w") == ["w #0"]
