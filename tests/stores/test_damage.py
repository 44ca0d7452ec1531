"""What commands and loads say of changed files of packs, in directories and in stores."""

from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import StorageError
from tests.cli.commands import json_of, run
from tests.stores.commands import Files, cuts, differing, problems, write
from tests.support.checkpoints import contents
from tests.support.entries import outcome, require_failure
from tests.support.folders import Folder
from tests.support.sharding import differences, no_data, state_of

ONE_SERVER = pytest.mark.parametrize("place", ["directory", "moto"], indirect=True)
BOTH_COMMANDS = pytest.mark.parametrize("command", ["inspect", "verify"])


def test_inspect_shows_what_the_index_says(files: Files) -> None:
    files.top.put("notes.txt", b"mine")

    lines = run("inspect", files.address).stdout.splitlines()

    assert lines[1].split()[:3] == ["v", "300x200", "float32"]
    shown = {line[:12].strip(): line[12:] for line in lines if line[:12].strip()}
    assert (shown["checkpoint"], shown["beside it"]) == (files.address, "notes.txt")
    assert "by 1 rank in 1 pack" in shown["saved"]
    found = json_of("inspect", files.address, "--keys", "w*")
    assert (found["path"], found["complete"], found["unfinished"]) == (files.address, True, False)
    assert (found["num_arrays"], found["num_objects"], found["objects"]) == (2, 2, [])
    assert found["others"] == ["notes.txt"]
    (array,) = found["arrays"]
    assert (array["key"], array["writers"], array["nbytes"]) == ("w", [0], 240_000)


@ONE_SERVER
def test_verify_lists_all_damage_not_just_the_first(files: Files) -> None:
    undamaged = json_of("verify", f"{files.address}/")
    assert (undamaged["whole"], undamaged["nbytes"] > 2 * 240_000) == (True, True)
    start = len(files.top.read(files.pack)) - 240_000
    files.flip(files.pack, start - 200_000, start)  # in v, in w
    files.flip("common.pt")
    files.top.put("metadata.json", b"{}")

    assert problems(files.address) == {
        files.pack: {"damaged"},
        "common.pt": {"damaged"},
        "metadata.json": {"damaged"},
    }
    result = run("verify", files.address)
    assert result.exit_code == 1
    of_pack = [line for line in result.stdout.splitlines() if files.pack in line]
    assert len(of_pack) == 2
    assert all("written by rank 0: bytes" in line for line in of_pack)
    titles = [line for line in result.stdout.splitlines() if line in {"v", "w"}]
    assert titles == ["v", "w"]


def test_a_directory_that_is_copied_into_a_bucket_is_a_checkpoint_there(
    in_bucket: Folder, tmp_path: Path
) -> None:
    for name, content in contents(Path(write(str(tmp_path / "c")))).items():
        in_bucket.put(name, content)
    url = in_bucket.address
    assert (differing(url, cuts()), problems(url)) == ([], {})

    pack = Files(in_bucket).pack
    in_bucket.delete(pack)
    assert problems(url)[pack] == {"missing_file"}


@ONE_SERVER
@BOTH_COMMANDS
def test_a_save_that_has_not_ended_is_reported(files: Files, command: str) -> None:
    for name in ("metadata.json", "index"):
        files.top.delete(name)

    result = run(command, files.address)

    assert result.exit_code == 1
    assert "a save has not ended" in result.stdout


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
        f"{root}/other": "no checkpoint of packs",
        "s3://not-there/run": "no bucket 'not-there'",
        "ftp://host/run": "expected s3://bucket/path",
    }.items():
        result = run(command, address)
        assert result.exit_code == (2 if address.startswith("ftp:") else 3), address
        assert said in result.stderr, (address, result.stderr)
        assert result.stderr.count("\n") == 1


def load(files: Files, verify: str, *keys: str) -> Any:
    """What comes back otherwise than it was saved, or the Failure."""
    wanted = [cut for cut in cuts() if not keys or cut.key in keys]
    asked = {} if keys else {"o": ShardedObject("o", None, (1,), (0,))}

    def wrong() -> list[str]:
        state = state_of(0, wanted, no_data) | asked
        loaded: Any = dist_ckpt_strategies.load(state, files.address, verify=verify)
        assert loaded["iteration"] == 3
        assert not asked or loaded["o"]["t"].tolist() == [1, 1, 1]
        return differences(0, wanted, loaded)

    return outcome(wrong)


@ONE_SERVER
def test_a_flipped_cut_or_missing_file_is_named_by_loads_and_verify(files: Files) -> None:
    index = next(name for name in files.top.names() if name.startswith("saves/"))
    for name in ("index", index, files.pack):
        content = files.top.read(name)
        for changed in (None, content[: len(content) // 2], b""):
            if changed is None:
                files.flip(name)
            else:
                files.top.put(name, changed)
            assert problems(files.address).keys() - {"common.pt"} == {name}
            require_failure(load(files, "read"), StorageError, name)
        files.top.put(name, content)
    files.top.delete(files.pack)
    require_failure(load(files, "read"), StorageError, "packs/")


@ONE_SERVER
def test_a_load_compares_what_it_reads_or_nothing(files: Files) -> None:
    content = files.top.read(files.pack)
    files.flip(files.pack, content.index(b"}") + 4096 * 2)  # in the first array
    wrong = {key for key in ("v", "w") if load(files, "read", key) != []}

    assert len(wrong) == 1
    (key,) = wrong
    assert load(files, "off", key) == [f"{key} #0"]
