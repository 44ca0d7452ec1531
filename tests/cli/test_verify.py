"""``dist-ckpt inspect`` and ``verify`` of format 1: lists, JSON, every sort of damage.

Also faults that are no damage, of packs.
"""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from tests.cli.commands import PROGRAM, issues_of, json_of, run
from tests.golden.sets import NAMES, GoldenSet
from tests.support.checkpoints import (
    ARRAYS,
    EMPTY,
    NESTED,
    RNG,
    WEIGHT,
    copied,
    write_foreign_checkpoint,
    write_metadata,
    write_object,
)
from tests.support.processes import ended
from tests.support.system_calls import before_calls


def test_keys_are_chosen_by_a_glob_and_objects_can_be_left_out(written: Path) -> None:
    text = run("inspect", written, "--keys", "*/bias").stdout
    assert NESTED in text
    assert WEIGHT not in text
    assert RNG not in text
    assert "arrays      4 in 10 files" in text
    assert RNG not in run("inspect", written, "--no-objects").stdout
    assert json_of("inspect", written, "--keys", "*_state", "--no-objects")["objects"] == []

    nothing = run("inspect", written, "--keys", "encoder.*", "--json")
    assert (nothing.exit_code, nothing.stdout) == (2, "")
    assert "none of its 6 keys matches 'encoder.*'" in nothing.stderr


def test_the_json_of_inspect(written: Path) -> None:
    found = json_of("inspect", written)

    assert (found["schema"], found["command"], found["path"]) == (3, "inspect", str(written))
    assert found["complete"] is True
    assert found["marker"] == {
        "sharded_backend": "zarr",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    sizes = {p: p.stat().st_size for p in written.rglob("*") if p.is_file()}
    assert found["common"] == {"path": "common.pt", "nbytes": sizes[written / "common.pt"]}
    assert (found["num_arrays"], found["num_objects"]) == (4, 2)
    assert (found["num_files"], found["nbytes"]) == (len(sizes), sum(sizes.values()))
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
        "file_nbytes": sum(size for path, size in sizes.items() if path.parent.name == RNG),
        "writers": [],
    }


def test_an_incomplete_checkpoint_is_shown_as_such(checkpoint: Path) -> None:
    for name in (f"{WEIGHT}/1.2", f"{RNG}/shard_0.0_2.2.pt", "common.pt", "metadata.json"):
        (checkpoint / name).unlink()

    text = run("inspect", checkpoint).stdout

    assert "5 of 6" in text
    assert "3 of 4" in text
    assert "backend     unknown" in text
    assert "common.pt   missing" in text
    assert "complete    NO, 4 issues; `dist-ckpt verify` lists them all" in text
    assert "metadata.json: expected the last file that a save writes, found no file" in text
    found = json_of("inspect", checkpoint)
    assert (found["complete"], found["marker"], found["common"]) == (False, None, None)
    problems = [one["problem"] for one in found["issues"]]
    assert problems == ["missing_marker", *["missing_file"] * 3]


def test_another_backend_is_described_by_its_marker(tmp_path: Path) -> None:
    root = write_foreign_checkpoint(tmp_path / "ckpt")

    text = run("inspect", root).stdout
    assert "backend     torch_dist 1; common state: torch 1" in text
    assert "in all      5 files" in text
    assert "complete    not known; dist-ckpt looks into packs and zarr 1 only" in text
    found = json_of("inspect", root)
    assert found["complete"] is None
    assert [finding["problem"] for finding in found["issues"]] == ["unknown_backend"]

    verified = run("verify", root).stdout
    assert "cannot be verified: it is torch_dist 1; dist-ckpt looks into packs" in verified
    assert json_of("verify", root)["whole"] is None


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_without_a_checkpoint_is_not_called_damaged(
    command: str, checkpoint: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for place in (root, root / "iter_2", root / "iter_10"):
        place.mkdir()

    result = run(command, root)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "root is no checkpoint: it has no file of one" in result.stderr
    for name in ("iter_2", "iter_10"):
        shutil.copytree(checkpoint, root / name, dirs_exist_ok=True)
    words = "it holds 2 checkpoints (iter_10, iter_2); name one of them"
    assert words in run(command, root).stderr
    assert words in run("diff", root, checkpoint).stderr


@pytest.mark.slow
def test_no_name_steers_the_terminal_or_is_taken_for_markup(checkpoint: Path) -> None:
    (checkpoint / WEIGHT).rename(checkpoint / "a\x1b[31m[red]b\nc")

    assert "a\\x1b[31m[red]b\\nc" in run("inspect", checkpoint).stdout
    keys = {array["key"] for array in json_of("inspect", checkpoint)["arrays"]}
    assert "a\x1b[31m[red]b\nc" in keys


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_that_may_not_be_listed_is_not_called_damaged(
    command: str, checkpoint: Path
) -> None:
    def refuse(_name: str, path: str) -> None:  # root, as which tests may run, is refused nothing
        if path and Path(path) == checkpoint:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with before_calls(refuse, ["scandir"]):
        result = run(command, checkpoint)

    assert result.exit_code == 3
    assert "cannot be listed: Permission denied" in result.output.replace("\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_megatron_have_no_issues(tmp_path: Path, name: str) -> None:
    root = GoldenSet.unpack(name, tmp_path).checkpoint
    assert issues_of(root) == []
    assert {one["kind"] for one in json_of("inspect", root)["stale_files"]} <= {"locks"}


@pytest.fixture(scope="module")
def whole(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Also with a compressed array, chunks in directories, and an object with older names."""
    root = copied(written, tmp_path_factory.mktemp("various") / "ckpt")
    place = str(root / "packed")
    packed = zarr.create_array(place, shape=(4, 4), chunks=(2, 2), dtype="f4", zarr_format=2)
    packed[...] = np.ones((4, 4), np.float32)
    write_metadata(root / "deep", shape=[2, 4], chunks=[1, 4], dimension_separator="/")
    for index in ("0", "1"):
        (root / "deep" / index).mkdir()
        (root / "deep" / index / "0").write_bytes(b"\1" * 16)
    for number in range(3):
        write_object(root / "older" / f"shard_0.{number}_1.pt", number)
    return root


CHUNK, METADATA, OBJECT = f"{WEIGHT}/0.0", f"{WEIGHT}/.zarray", f"{WEIGHT}/shard_0_1.pt"
SHARD = f"{RNG}/shard_0.0_2.2.pt"
MARKER = "metadata.json"
DAMAGES = {
    "true": "",
    f"rm {CHUNK}": f"missing_file {CHUNK}",
    f"truncate -s 15 {CHUNK}": f"wrong_size {CHUNK}",
    f"rm {CHUNK}; mkfifo {CHUNK}": f"missing_file {CHUNK}",
    f"cp {CHUNK} {WEIGHT}/2.0": f"unexpected_file {WEIGHT}/2.0",
    f"cp {CHUNK} {WEIGHT}/0; cp {CHUNK} {WEIGHT}/01.0": f"unexpected_file {WEIGHT}/0 {WEIGHT}/01.0",
    f"touch {EMPTY}/0.0": f"unexpected_file {EMPTY}/0.0",
    f"rm {NESTED}/.zarray": f"missing_file {NESTED}/.zarray",
    f"truncate -s 16 {METADATA}": f"damaged {METADATA}",
    f"sed -i 's/<f4/|O/' {METADATA}": f"damaged {METADATA}",
    f"rm {SHARD}": f"missing_file {SHARD}",
    f"sed -i s/state/stage/ {SHARD}": f"damaged {SHARD}",
    f"cp {SHARD} {RNG}/shard_0.2_2.2.pt": f"unexpected_file {RNG}/shard_0.2_2.2.pt",
    f"cp {SHARD} {RNG}/shard_0.0_1.2.pt": f"missing_file {RNG}/shard_0.1_1.2.pt",
    f"rm {OBJECT}; mkdir {OBJECT}": f"unreadable {OBJECT}",
    f"ln -sf shard_0_1.pt {OBJECT}": f"unreadable {OBJECT}",
    "rm common.pt": "missing_file common.pt",
    "rm older/*": "unexpected_file older",
    f"rm {EMPTY}/.zarray": f"unexpected_file {EMPTY}",
    f"rm {EMPTY}/.zarray; mkdir {EMPTY}/.zarray": f"unreadable {EMPTY}/.zarray",
    f"rm {METADATA}; mkdir {METADATA}": f"unreadable {METADATA}",
    f"rm {MARKER}": f"missing_marker {MARKER}",
    f"rm {MARKER}; mkfifo {MARKER}": f"unreadable {MARKER}",
    f"printf '\\377\\376' > {MARKER}": f"damaged {MARKER}",
    f"sed -i s/torch/msgpack/ {MARKER}": f"unknown_backend {MARKER}",
    "truncate -s 0 packed/0.1": "wrong_size packed/0.1",
    "rm older/shard_0.1_1.pt": "missing_file older/shard_0.1_1.pt",
    "rm deep/1/0": "missing_file deep/1/0",
    "cp deep/1/0 deep/1/1": "unexpected_file deep/1/1",
    "rm deep/.zarray": "missing_file deep/.zarray",
}
"""The damage, as a line for the shell, and what is found: a problem, and the paths that have it."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_nothing_else(whole: Path, tmp_path: Path, damage: str) -> None:
    root = copied(whole, tmp_path / "ckpt")
    done = ended("/bin/sh", "-c", f"cd {root} && {damage}")
    assert done.returncode == 0, done.stderr

    problem, *paths = DAMAGES[damage].split() or [""]
    key_of = {path: path.rpartition("/")[0] or None for path in paths}
    key_of |= {"deep/1/0": "deep", "deep/1/1": "deep"}
    assert issues_of(root) == [(problem, key_of[path], path) for path in paths]
    found = json_of("inspect", root)
    assert found["unfinished"] is (problem == "missing_marker")
    num_files = sum(path.is_file() for path in root.rglob("*"))
    assert problem or found["num_files"] == num_files


def test_a_chunk_that_the_disk_cannot_read_is_found(checkpoint: Path) -> None:
    def fail(_: str, path: str) -> None:
        if path.endswith(CHUNK):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with before_calls(fail, ["preadv"]):
        assert issues_of(checkpoint) == [("unreadable", WEIGHT, CHUNK)]


@pytest.mark.parametrize("shape", [[10**15], [10**6, 10**6], [10**30]], ids=str)
def test_an_array_of_a_shape_beyond_all_bounds_lacks_its_chunks(
    checkpoint: Path, shape: list[int]
) -> None:
    write_metadata(checkpoint / "huge", shape=shape, chunks=[1] * len(shape))

    assert issues_of(checkpoint) == [("missing_file", "huge", "huge")]


def test_files_of_a_killed_save_are_listed_and_harmless(checkpoint: Path) -> None:
    (checkpoint / ".removed-w").mkdir()
    (checkpoint / ".partial-45").mkdir()
    left = {
        ".partial-0123": ("partial", 2),
        ".partial-45/0.0": ("partial", 6),
        ".removed-w/0.0": ("removed", 5),
        f"{WEIGHT}/0.0_61722fe5c975a722.__lock": ("partial", 3),
        f"{WEIGHT}/0.6172.partial": ("partial", 4),
    }
    for name, (_, nbytes) in left.items():
        (checkpoint / name).write_bytes(bytes(nbytes))

    assert issues_of(checkpoint) == []
    found = json_of("inspect", checkpoint)["stale_files"]
    assert [(one["path"], (one["kind"], one["nbytes"])) for one in found] == [
        (name.removesuffix("/0.0"), what) for name, what in left.items()
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


@pytest.mark.parametrize(("call", "name"), [("open", "index"), ("scandir", "packs")])
def test_packs_that_may_not_be_read_are_not_called_damaged(
    call: str, name: str, tmp_path: Path
) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
    dist_ckpt_strategies.save(state, tmp_path / "c")

    def refuse(_name: str, path: str) -> None:
        if path == str(tmp_path / "c" / name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with before_calls(refuse, [call]):
        found = run("verify", tmp_path / "c")

    assert found.exit_code == 3
    assert "permission denied" in found.stdout.lower()
    assert "no file" not in found.stdout


def test_a_reader_that_goes_is_no_damage(written: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*PROGRAM, "inspect", str(written)], stdout=write, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write)

    assert (done.returncode, done.stderr) == (141, b"")
