"""Scans of ("zarr", 1) checkpoints: what is there, and every sort of damage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import CheckpointNotFoundError
from dist_ckpt_strategies.formats.issues import (
    Issue,
    Problem,
    StaleFile,
    StaleKind,
    Watch,
)
from dist_ckpt_strategies.formats.scan import scan, verify
from tests.support.checkpoints import (
    ARRAYS,
    EMPTY,
    NESTED,
    RNG,
    SCALAR,
    WEIGHT,
    copied,
    flip_bit,
    golden_archives,
    unpack,
    write_checkpoint,
    write_foreign_checkpoint,
    write_metadata,
)
from tests.support.objects import write_object

Damage = Callable[[Path], object]
GOLDEN = golden_archives()


def check_checkpoint(root: Path, watch: Watch | None = None) -> tuple[Issue, ...]:
    """What ``dist-ckpt verify`` does."""
    return verify(scan(root, watch), watch)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint, not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("whole") / "ckpt")


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A whole checkpoint, to be damaged."""
    return copied(written, tmp_path / "ckpt")


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of a file."""
    path.unlink()
    make(path)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def summary(issues: tuple[Issue, ...]) -> list[tuple[Problem, str | None, str]]:
    return [(issue.problem, issue.key, issue.path) for issue in issues]


@pytest.mark.parametrize("name", GOLDEN)
def test_what_megatron_wrote_has_no_issues(tmp_path: Path, name: str) -> None:
    assert check_checkpoint(unpack(GOLDEN[name], tmp_path)) == ()


def test_locks_of_the_old_backend_are_stale_files_and_no_arrays(tmp_path: Path) -> None:
    found = scan(unpack(GOLDEN["m0153_tp2pp2dp2_flat"], tmp_path))

    assert {stale.kind for stale in found.stale_files} == {StaleKind.LOCKS}
    assert len(found.stale_files) == 51
    assert len(found.arrays) == 68
    assert sum(stored.num_chunks for stored in found.arrays) == 380
    assert [stored.num_shards for stored in found.objects] == [4] * 5


DAMAGES: dict[str, tuple[Damage, list[tuple[Problem, str | None, str]]]] = {
    "a missing chunk": (
        lambda root: (root / WEIGHT / "1.2").unlink(),
        [(Problem.MISSING_FILE, WEIGHT, f"{WEIGHT}/1.2")],
    ),
    "a truncated chunk": (
        lambda root: (root / WEIGHT / "0.1").write_bytes(b"\1" * 15),
        [(Problem.WRONG_SIZE, WEIGHT, f"{WEIGHT}/0.1")],
    ),
    "chunks outside of the grid": (
        lambda root: [
            shutil.copy(root / WEIGHT / "0.0", root / WEIGHT / name)
            for name in ("2.0", "0", "01.0")
        ],
        [(Problem.UNEXPECTED_FILE, WEIGHT, f"{WEIGHT}/{name}") for name in ("0", "01.0", "2.0")],
    ),
    "a chunk of an empty array": (
        lambda root: (root / EMPTY / "0.0").write_bytes(b""),
        [(Problem.UNEXPECTED_FILE, EMPTY, f"{EMPTY}/0.0")],
    ),
    "missing metadata": (
        lambda root: (root / NESTED / ".zarray").unlink(),
        [(Problem.MISSING_FILE, NESTED, f"{NESTED}/.zarray")],
    ),
    "truncated metadata": (
        lambda root: (root / WEIGHT / ".zarray").write_bytes(b'{"shape": [4, 6]'),
        [(Problem.DAMAGED, WEIGHT, f"{WEIGHT}/.zarray")],
    ),
    "metadata of nothing that torch knows": (
        lambda root: write_metadata(root / WEIGHT, dtype="|O"),
        [(Problem.DAMAGED, WEIGHT, f"{WEIGHT}/.zarray")],
    ),
    "a missing shard of an object": (
        lambda root: (root / RNG / "shard_1.0_2.2.pt").unlink(),
        [(Problem.MISSING_FILE, RNG, f"{RNG}/shard_1.0_2.2.pt")],
    ),
    "a shard outside of the grid": (
        lambda root: shutil.copy(root / RNG / "shard_0.0_2.2.pt", root / RNG / "shard_0.2_2.2.pt"),
        [(Problem.UNEXPECTED_FILE, RNG, f"{RNG}/shard_0.2_2.2.pt")],
    ),
    "a shard of another grid": (
        lambda root: shutil.copy(root / RNG / "shard_0.0_2.2.pt", root / RNG / "shard_0.0_1.2.pt"),
        [(Problem.MISSING_FILE, RNG, f"{RNG}/shard_0.1_1.2.pt")],
    ),
    "a flipped bit in an object": (
        lambda root: flip_bit(root / RNG / "shard_1.1_2.2.pt", b"state"),
        [(Problem.DAMAGED, RNG, f"{RNG}/shard_1.1_2.2.pt")],
    ),
    "a directory in the place of an object": (
        lambda root: replace(root / WEIGHT / "shard_0_1.pt", Path.mkdir),
        [(Problem.UNREADABLE, WEIGHT, f"{WEIGHT}/shard_0_1.pt")],
    ),
    "a link in a circle in the place of an object": (
        lambda root: replace(root / WEIGHT / "shard_0_1.pt", link_to_itself),
        [(Problem.UNREADABLE, WEIGHT, f"{WEIGHT}/shard_0_1.pt")],
    ),
    "a pipe in the place of a chunk": (
        lambda root: replace(root / SCALAR / "0", os.mkfifo),
        [(Problem.MISSING_FILE, SCALAR, f"{SCALAR}/0")],
    ),
    "a pipe in the place of the marker": (
        lambda root: replace(root / "metadata.json", os.mkfifo),
        [(Problem.UNREADABLE, None, "metadata.json")],
    ),
    "missing common state": (
        lambda root: (root / "common.pt").unlink(),
        [(Problem.MISSING_FILE, None, "common.pt")],
    ),
    "a missing marker": (
        lambda root: (root / "metadata.json").unlink(),
        [(Problem.MISSING_MARKER, None, "metadata.json")],
    ),
    "garbage for a marker": (
        lambda root: (root / "metadata.json").write_bytes(b"\xff\xfe"),
        [(Problem.DAMAGED, None, "metadata.json")],
    ),
    "a marker of an unknown common backend": (
        lambda root: (root / "metadata.json").write_text(
            '{"sharded_backend": "zarr", "common_backend": "msgpack"}'
        ),
        [(Problem.UNKNOWN_BACKEND, None, "metadata.json")],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_nothing_else(checkpoint: Path, name: str) -> None:
    damage, expected = DAMAGES[name]
    damage(checkpoint)

    assert summary(check_checkpoint(checkpoint)) == expected
    has_marker = expected[0][0] is not Problem.MISSING_MARKER
    assert scan(checkpoint).is_unfinished is not has_marker


def test_compressed_chunks_need_only_hold_something(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    values = np.zeros((4, 4), np.float32)
    array = zarr.create_array(
        str(root / "packed"), shape=(4, 4), chunks=(2, 2), dtype="f4", zarr_format=2
    )
    array[...] = values + 1
    assert check_checkpoint(root) == ()

    (root / "packed" / "0.1").write_bytes(b"")
    (root / "packed" / "1.1").unlink()

    assert summary(check_checkpoint(root)) == [
        (Problem.WRONG_SIZE, "packed", "packed/0.1"),
        (Problem.MISSING_FILE, "packed", "packed/1.1"),
    ]


def test_chunks_may_lie_in_numbered_directories(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    write_metadata(root / "deep", shape=[2, 4], chunks=[1, 4], dimension_separator="/")
    for index in range(2):
        (root / "deep" / str(index)).mkdir()
        (root / "deep" / str(index) / "0").write_bytes(b"\1" * 16)

    found = scan(root)
    assert found.issues == ()
    assert found.num_files == sum(path.is_file() for path in root.rglob("*"))

    (root / "deep" / "1" / "0").rename(root / "deep" / "1" / "1")
    assert summary(check_checkpoint(root)) == [
        (Problem.MISSING_FILE, "deep", "deep/1/0"),
        (Problem.UNEXPECTED_FILE, "deep", "deep/1/1"),
    ]

    (root / "deep" / ".zarray").unlink()
    assert summary(check_checkpoint(root)) == [
        (Problem.MISSING_FILE, "deep", "deep/.zarray"),
    ]


def test_objects_of_the_older_form_end_at_the_largest_offset(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    for number in range(3):
        path = root / write_and_rename(root, number)
        assert path.exists()
    assert check_checkpoint(root) == ()

    (root / "older" / "shard_0.1_1.pt").unlink()

    assert (Problem.MISSING_FILE, "older", "older/shard_0.1_1.pt") in summary(
        check_checkpoint(root)
    )


def write_and_rename(root: Path, number: int) -> str:
    object_id = ObjectId("older", (0, number), (1, 3))
    write_object(root, object_id, number)
    older = f"{object_id.older_key}.pt"
    (root / f"{object_id.unique_key}.pt").rename(root / older)
    return older


def test_what_a_killed_save_left_is_listed_and_harmless(checkpoint: Path) -> None:
    (checkpoint / ".partial-0123").write_bytes(b"12")
    (checkpoint / WEIGHT / "0.0_61722fe5c975a722.__lock").write_bytes(b"123")
    (checkpoint / WEIGHT / "0.6172.partial").write_bytes(b"1234")
    (checkpoint / ".removed-w").mkdir()
    (checkpoint / ".removed-w" / "0.0").write_bytes(b"12345")

    assert check_checkpoint(checkpoint) == ()
    assert scan(checkpoint).stale_files == (
        StaleFile(StaleKind.PARTIAL, ".partial-0123", 2),
        StaleFile(StaleKind.REMOVED, ".removed-w", 5),
        StaleFile(StaleKind.PARTIAL, f"{WEIGHT}/0.0_61722fe5c975a722.__lock", 3),
        StaleFile(StaleKind.PARTIAL, f"{WEIGHT}/0.6172.partial", 4),
    )


@pytest.mark.parametrize("shape", [[10**15], [10**6, 10**6], [10**30]])
def test_a_shape_beyond_all_bounds_takes_neither_time_nor_memory(
    checkpoint: Path, shape: list[int]
) -> None:
    write_metadata(checkpoint / "huge", shape=shape, chunks=[1] * len(shape))

    issues = check_checkpoint(checkpoint)

    assert summary(issues) == [(Problem.MISSING_FILE, "huge", "huge")]
    assert "are missing" in issues[0].found


def test_another_backend_is_counted_and_not_looked_into(tmp_path: Path) -> None:
    root = write_foreign_checkpoint(tmp_path / "ckpt")

    found = scan(root)

    assert found.is_foreign
    assert found.num_files == 5
    assert (found.arrays, found.objects) == ((), ())
    (issue,) = check_checkpoint(root)
    assert issue.problem is Problem.UNKNOWN_BACKEND
    assert issue.expected == "sharded backend zarr version 1"
    assert issue.found == "torch_dist version 1"


def test_a_directory_of_checkpoints_is_refused_by_their_names(
    written: Path, tmp_path: Path
) -> None:
    for iteration in (100, 200):
        copied(written, tmp_path / f"iter_{iteration:07}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200")

    with pytest.raises(CheckpointNotFoundError, match=r"holds 2 \(iter_0000100, iter_0000200\)"):
        check_checkpoint(tmp_path)


def test_an_array_may_be_a_link_and_links_in_circles_end(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / WEIGHT).rename(tmp_path / "elsewhere")
    (checkpoint / WEIGHT).symlink_to(tmp_path / "elsewhere")
    (checkpoint / "circle").symlink_to(checkpoint)
    (checkpoint / "model" / "circle").symlink_to(checkpoint / "model")
    (checkpoint / "broken").symlink_to(tmp_path / "nowhere")

    assert check_checkpoint(checkpoint) == ()
    assert [stored.array.key for stored in scan(checkpoint).arrays] == ARRAYS

    (tmp_path / "elsewhere" / "0.0").unlink()
    assert summary(check_checkpoint(checkpoint)) == [
        (Problem.MISSING_FILE, WEIGHT, f"{WEIGHT}/0.0")
    ]


def test_progress_ends_at_all_of_it(written: Path) -> None:
    seen: list[tuple[int, int]] = []

    check_checkpoint(written, lambda done, total: seen.append((done, total)))

    num_folders = 1 + sum(path.is_dir() for path in written.rglob("*"))
    assert seen[num_folders - 1] == (num_folders, num_folders)
    read = [*written.rglob("*.pt"), *(path for path in written.rglob("[0-9]*") if path.is_file())]
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in read)


def test_a_scan_needs_neither_torch_nor_tensorstore() -> None:
    script = """
import sys
import dist_ckpt_strategies.formats.scan
print([name for name in ("torch", "tensorstore", "zarr", "megatron") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)

    assert result.stdout.decode().strip() == "[]"
