"""Surveys and checks of checkpoint directories: what is there, and every sort of damage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from dist_ckpt_strategies.errors import CheckpointNotFoundError
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.disk.folders import Folder, read_folder
from dist_ckpt_strategies.storage.findings import (
    MAX_LISTED,
    Finding,
    Leftover,
    LeftoverKind,
    Problem,
    Watch,
)
from dist_ckpt_strategies.storage.format1.survey import check_survey, survey_checkpoint
from dist_ckpt_strategies.storage.objects.pickled import write_object
from tests.support.checkpoints import (
    ARRAYS,
    EMPTY,
    NESTED,
    OBJECTS,
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

Damage = Callable[[Path], object]
GOLDEN = golden_archives()


def check_checkpoint(root: Path, watch: Watch | None = None) -> tuple[Finding, ...]:
    """What ``dist-ckpt verify`` does."""
    return check_survey(survey_checkpoint(root, watch), watch)


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


def summary(findings: tuple[Finding, ...]) -> list[tuple[Problem, str | None, str]]:
    return [(finding.problem, finding.key, finding.path) for finding in findings]


def test_a_survey_says_what_a_checkpoint_holds(written: Path) -> None:
    survey = survey_checkpoint(written)

    arrays = {stored.array.key: stored for stored in survey.arrays}
    assert list(arrays) == ARRAYS
    assert arrays[WEIGHT].array == ArraySpec(WEIGHT, (4, 6), DType.FLOAT32, (2, 2))
    assert (arrays[WEIGHT].num_chunks, arrays[WEIGHT].file_nbytes) == (6, 96)
    assert (arrays[NESTED].num_chunks, arrays[NESTED].file_nbytes) == (3, 12)
    assert (arrays[SCALAR].num_chunks, arrays[SCALAR].file_nbytes) == (1, 8)
    assert (arrays[EMPTY].num_chunks, arrays[EMPTY].array.num_chunks) == (0, 0)
    objects = {stored.key: stored for stored in survey.objects}
    assert list(objects) == OBJECTS
    assert (objects[RNG].shape, objects[RNG].num_shards) == ((2, 2), 4)
    assert objects[RNG].file_nbytes == sum(f.stat().st_size for f in (written / RNG).iterdir())
    assert survey.marker == CheckpointMarker("zarr")
    assert survey.common is not None
    assert survey.common.nbytes == (written / "common.pt").stat().st_size
    files = [path for path in written.rglob("*") if path.is_file()]
    assert survey.num_files == len(files)
    assert survey.nbytes == sum(path.stat().st_size for path in files)
    assert (survey.leftovers, survey.findings, survey.is_foreign) == ((), (), False)


def test_a_whole_checkpoint_has_no_findings(written: Path) -> None:
    assert check_checkpoint(written) == ()


@pytest.mark.parametrize("name", GOLDEN)
def test_what_megatron_wrote_has_no_findings(tmp_path: Path, name: str) -> None:
    assert check_checkpoint(unpack(GOLDEN[name], tmp_path)) == ()


def test_locks_of_the_old_backend_are_left_over_and_no_arrays(tmp_path: Path) -> None:
    survey = survey_checkpoint(unpack(GOLDEN["m0153_tp2pp2dp2_flat"], tmp_path))

    assert {leftover.kind for leftover in survey.leftovers} == {LeftoverKind.LOCKS}
    assert len(survey.leftovers) == 51
    assert len(survey.arrays) == 68
    assert sum(stored.num_chunks for stored in survey.arrays) == 380
    assert [stored.num_shards for stored in survey.objects] == [4] * 5


DAMAGES: dict[str, tuple[Damage, list[tuple[Problem, str | None, str]]]] = {
    "a missing chunk": (
        lambda root: (root / WEIGHT / "1.2").unlink(),
        [(Problem.MISSING_CHUNK, WEIGHT, f"{WEIGHT}/1.2")],
    ),
    "a truncated chunk": (
        lambda root: (root / WEIGHT / "0.1").write_bytes(b"\1" * 15),
        [(Problem.WRONG_CHUNK_SIZE, WEIGHT, f"{WEIGHT}/0.1")],
    ),
    "an emptied chunk": (
        lambda root: (root / SCALAR / "0").write_bytes(b""),
        [(Problem.WRONG_CHUNK_SIZE, SCALAR, f"{SCALAR}/0")],
    ),
    "a chunk that is too long": (
        lambda root: (root / NESTED / "2").write_bytes(b"\1" * 5),
        [(Problem.WRONG_CHUNK_SIZE, NESTED, f"{NESTED}/2")],
    ),
    "chunks outside of the grid": (
        lambda root: [
            shutil.copy(root / WEIGHT / "0.0", root / WEIGHT / name)
            for name in ("2.0", "0", "01.0")
        ],
        [(Problem.UNEXPECTED_CHUNK, WEIGHT, f"{WEIGHT}/{name}") for name in ("0", "01.0", "2.0")],
    ),
    "a chunk of an empty array": (
        lambda root: (root / EMPTY / "0.0").write_bytes(b""),
        [(Problem.UNEXPECTED_CHUNK, EMPTY, f"{EMPTY}/0.0")],
    ),
    "missing metadata": (
        lambda root: (root / NESTED / ".zarray").unlink(),
        [(Problem.MISSING_METADATA, NESTED, f"{NESTED}/.zarray")],
    ),
    "garbage for metadata": (
        lambda root: (root / WEIGHT / ".zarray").write_bytes(b"\xff\0{"),
        [(Problem.BAD_METADATA, WEIGHT, f"{WEIGHT}/.zarray")],
    ),
    "truncated metadata": (
        lambda root: (root / WEIGHT / ".zarray").write_bytes(b'{"shape": [4, 6]'),
        [(Problem.BAD_METADATA, WEIGHT, f"{WEIGHT}/.zarray")],
    ),
    "metadata of nothing that torch knows": (
        lambda root: write_metadata(root / WEIGHT, dtype="|O"),
        [(Problem.BAD_METADATA, WEIGHT, f"{WEIGHT}/.zarray")],
    ),
    "a missing shard of an object": (
        lambda root: (root / RNG / "shard_1.0_2.2.pt").unlink(),
        [(Problem.MISSING_OBJECT, RNG, f"{RNG}/shard_1.0_2.2.pt")],
    ),
    "a shard outside of the grid": (
        lambda root: shutil.copy(root / RNG / "shard_0.0_2.2.pt", root / RNG / "shard_0.2_2.2.pt"),
        [(Problem.UNEXPECTED_OBJECT, RNG, f"{RNG}/shard_0.2_2.2.pt")],
    ),
    "a shard of another grid": (
        lambda root: shutil.copy(root / RNG / "shard_0.0_2.2.pt", root / RNG / "shard_0.0_1.2.pt"),
        [(Problem.MISSING_OBJECT, RNG, f"{RNG}/shard_0.1_1.2.pt")],
    ),
    "a flipped bit in an object": (
        lambda root: flip_bit(root / RNG / "shard_1.1_2.2.pt", b"state"),
        [(Problem.DAMAGED_ARCHIVE, RNG, f"{RNG}/shard_1.1_2.2.pt")],
    ),
    "an emptied object": (
        lambda root: (root / RNG / "shard_1.1_2.2.pt").write_bytes(b""),
        [(Problem.DAMAGED_ARCHIVE, RNG, f"{RNG}/shard_1.1_2.2.pt")],
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
        [(Problem.MISSING_CHUNK, SCALAR, f"{SCALAR}/0")],
    ),
    "a link in a circle in the place of a chunk": (
        lambda root: replace(root / SCALAR / "0", link_to_itself),
        [(Problem.MISSING_CHUNK, SCALAR, f"{SCALAR}/0")],
    ),
    "a pipe in the place of the marker": (
        lambda root: replace(root / "metadata.json", os.mkfifo),
        [(Problem.UNREADABLE, None, "metadata.json")],
    ),
    "missing common state": (
        lambda root: (root / "common.pt").unlink(),
        [(Problem.MISSING_COMMON, None, "common.pt")],
    ),
    "truncated common state": (
        lambda root: (root / "common.pt").write_bytes((root / "common.pt").read_bytes()[:-1]),
        [(Problem.DAMAGED_ARCHIVE, None, "common.pt")],
    ),
    "a missing marker": (
        lambda root: (root / "metadata.json").unlink(),
        [(Problem.MISSING_MARKER, None, "metadata.json")],
    ),
    "garbage for a marker": (
        lambda root: (root / "metadata.json").write_bytes(b"\xff\xfe"),
        [(Problem.BAD_MARKER, None, "metadata.json")],
    ),
    "a marker nested without end": (
        lambda root: (root / "metadata.json").write_text("[" * 100_000),
        [(Problem.BAD_MARKER, None, "metadata.json")],
    ),
    "half a marker": (
        lambda root: (root / "metadata.json").write_text('{"sharded_backend": "za'),
        [(Problem.BAD_MARKER, None, "metadata.json")],
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


def test_all_damages_at_once_are_sorted_by_key(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").unlink()
    (checkpoint / RNG / "shard_1.0_2.2.pt").unlink()
    for name in ("1.2", "0.0"):
        (checkpoint / WEIGHT / name).unlink()

    assert summary(check_checkpoint(checkpoint)) == [
        (Problem.MISSING_MARKER, None, "metadata.json"),
        (Problem.MISSING_CHUNK, WEIGHT, f"{WEIGHT}/0.0"),
        (Problem.MISSING_CHUNK, WEIGHT, f"{WEIGHT}/1.2"),
        (Problem.MISSING_OBJECT, RNG, f"{RNG}/shard_1.0_2.2.pt"),
    ]


def test_a_finding_says_what_was_expected_and_found(checkpoint: Path) -> None:
    (checkpoint / WEIGHT / "0.1").write_bytes(b"\1" * 15)

    (finding,) = check_checkpoint(checkpoint)

    assert str(finding) == f"{WEIGHT}/0.1: expected 16 bytes, found 15 bytes"


def test_a_survey_sees_damage_without_reading_objects(checkpoint: Path) -> None:
    (checkpoint / WEIGHT / "0.1").unlink()
    flip_bit(checkpoint / RNG / "shard_1.1_2.2.pt", b"state")

    survey = survey_checkpoint(checkpoint)

    assert summary(survey.findings) == [(Problem.MISSING_CHUNK, WEIGHT, f"{WEIGHT}/0.1")]
    stored = next(stored for stored in survey.arrays if stored.array.key == WEIGHT)
    assert (stored.num_chunks, stored.array.num_chunks, stored.file_nbytes) == (5, 6, 80)


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
        (Problem.WRONG_CHUNK_SIZE, "packed", "packed/0.1"),
        (Problem.MISSING_CHUNK, "packed", "packed/1.1"),
    ]


def test_chunks_may_lie_in_numbered_directories(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    write_metadata(root / "deep", shape=[2, 4], chunks=[1, 4], dimension_separator="/")
    for index in range(2):
        (root / "deep" / str(index)).mkdir()
        (root / "deep" / str(index) / "0").write_bytes(b"\1" * 16)

    survey = survey_checkpoint(root)
    assert survey.findings == ()
    assert survey.num_files == sum(path.is_file() for path in root.rglob("*"))

    (root / "deep" / "1" / "0").rename(root / "deep" / "1" / "1")
    assert summary(check_checkpoint(root)) == [
        (Problem.MISSING_CHUNK, "deep", "deep/1/0"),
        (Problem.UNEXPECTED_CHUNK, "deep", "deep/1/1"),
    ]

    (root / "deep" / ".zarray").unlink()
    assert summary(check_checkpoint(root)) == [
        (Problem.MISSING_METADATA, "deep", "deep/.zarray"),
    ]


def test_objects_of_the_older_form_end_at_the_largest_offset(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    for number in range(3):
        path = root / write_and_rename(root, number)
        assert path.exists()
    assert check_checkpoint(root) == ()

    (root / "older" / "shard_0.1_1.pt").unlink()

    assert (Problem.MISSING_OBJECT, "older", "older/shard_0.1_1.pt") in summary(
        check_checkpoint(root)
    )


def write_and_rename(root: Path, number: int) -> str:
    object_id = ObjectId("older", (0, number), (1, 3))
    write_object(root, object_id, number)
    older = f"{object_id.older_key}.pt"
    (root / f"{object_id.unique_key}.pt").rename(root / older)
    return older


def test_remains_of_a_killed_save_are_left_over_and_harmless(checkpoint: Path) -> None:
    (checkpoint / ".partial-0123").write_bytes(b"12")
    (checkpoint / WEIGHT / "0.0_61722fe5c975a722.__lock").write_bytes(b"123")
    (checkpoint / WEIGHT / "0.6172.partial").write_bytes(b"1234")
    (checkpoint / ".removed-w").mkdir()
    (checkpoint / ".removed-w" / "0.0").write_bytes(b"12345")

    assert check_checkpoint(checkpoint) == ()
    assert survey_checkpoint(checkpoint).leftovers == (
        Leftover(LeftoverKind.PARTIAL, ".partial-0123", 2),
        Leftover(LeftoverKind.REMOVED, ".removed-w", 5),
        Leftover(LeftoverKind.PARTIAL, f"{WEIGHT}/0.0_61722fe5c975a722.__lock", 3),
        Leftover(LeftoverKind.PARTIAL, f"{WEIGHT}/0.6172.partial", 4),
    )


@pytest.mark.parametrize("shape", [[10**15], [10**6, 10**6], [10**30]])
def test_a_shape_beyond_all_bounds_takes_neither_time_nor_memory(
    checkpoint: Path, shape: list[int]
) -> None:
    write_metadata(checkpoint / "huge", shape=shape, chunks=[1] * len(shape))

    findings = check_checkpoint(checkpoint)

    assert len(findings) == MAX_LISTED + 1
    assert findings[-1].path == "huge"
    assert "more are missing" in findings[-1].found


def test_a_grid_of_objects_beyond_all_bounds_takes_neither_time_nor_memory(
    checkpoint: Path,
) -> None:
    shutil.copy(checkpoint / RNG / "shard_0.0_2.2.pt", checkpoint / RNG / f"shard_0_{10**15}.pt")

    findings = check_checkpoint(checkpoint)

    assert len(findings) == MAX_LISTED + 1
    assert {finding.problem for finding in findings} == {Problem.MISSING_OBJECT}


def test_another_backend_is_counted_and_not_looked_into(tmp_path: Path) -> None:
    root = write_foreign_checkpoint(tmp_path / "ckpt")

    survey = survey_checkpoint(root)

    assert survey.is_foreign
    assert survey.num_files == 5
    assert (survey.arrays, survey.objects) == ((), ())
    (finding,) = check_checkpoint(root)
    assert finding.problem is Problem.UNKNOWN_BACKEND
    assert finding.expected == "sharded backend zarr version 1"
    assert finding.found == "torch_dist version 1"


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint directory .* does not exist"):
        survey_checkpoint(tmp_path / "nowhere")


def test_a_directory_of_checkpoints_is_refused_by_their_names(
    written: Path, tmp_path: Path
) -> None:
    for iteration in (100, 200):
        copied(written, tmp_path / f"iter_{iteration:07}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200")

    with pytest.raises(CheckpointNotFoundError, match=r"holds 2 \(iter_0000100, iter_0000200\)"):
        check_checkpoint(tmp_path)


def test_an_empty_directory_is_an_incomplete_checkpoint(tmp_path: Path) -> None:
    assert [finding.problem for finding in check_checkpoint(tmp_path)] == [
        Problem.MISSING_MARKER,
        Problem.MISSING_COMMON,
    ]


def test_a_checkpoint_within_a_checkpoint_is_none_of_its_business(
    checkpoint: Path, written: Path
) -> None:
    before = survey_checkpoint(checkpoint)
    copied(written, checkpoint / "inner")
    (checkpoint / "inner" / WEIGHT / "0.0").unlink()

    assert survey_checkpoint(checkpoint) == before
    assert check_checkpoint(checkpoint) == ()


def test_an_array_may_be_a_link_and_links_in_circles_end(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / WEIGHT).rename(tmp_path / "elsewhere")
    (checkpoint / WEIGHT).symlink_to(tmp_path / "elsewhere")
    (checkpoint / "circle").symlink_to(checkpoint)
    (checkpoint / "model" / "circle").symlink_to(checkpoint / "model")
    (checkpoint / "broken").symlink_to(tmp_path / "nowhere")

    assert check_checkpoint(checkpoint) == ()
    assert [stored.array.key for stored in survey_checkpoint(checkpoint).arrays] == ARRAYS

    (tmp_path / "elsewhere" / "0.0").unlink()
    assert summary(check_checkpoint(checkpoint)) == [
        (Problem.MISSING_CHUNK, WEIGHT, f"{WEIGHT}/0.0")
    ]


def test_a_directory_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert read_folder(tmp_path, "file").failure == "Not a directory"
    assert read_folder(tmp_path, "gone") == Folder("gone", {})


def test_a_key_may_hold_anything_that_a_file_name_may(checkpoint: Path) -> None:
    key = "line\nbreak \x1b[31m [red] \udcff"
    shutil.copytree(checkpoint / WEIGHT, checkpoint / key)
    (checkpoint / key / "0.0").unlink()

    assert summary(check_checkpoint(checkpoint)) == [(Problem.MISSING_CHUNK, key, f"{key}/0.0")]


def test_progress_ends_at_all_of_it(written: Path) -> None:
    seen: list[tuple[int, int]] = []

    check_checkpoint(written, lambda done, total: seen.append((done, total)))

    num_folders = 1 + sum(path.is_dir() for path in written.rglob("*"))
    assert seen[num_folders - 1] == (num_folders, num_folders)
    assert seen[-1][0] == seen[-1][1] == sum(f.stat().st_size for f in written.rglob("*.pt"))


def test_a_survey_needs_neither_torch_nor_tensorstore() -> None:
    script = """
import sys
import dist_ckpt_strategies.storage.format1.survey
print([name for name in ("torch", "tensorstore", "zarr", "megatron") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)

    assert result.stdout.decode().strip() == "[]"


def test_a_thousand_arrays_take_less_than_half_a_second(tmp_path: Path) -> None:
    for number in range(1000):
        write_metadata(tmp_path / f"decoder.layers.{number}.weight")
        (tmp_path / f"decoder.layers.{number}.weight" / "0").write_bytes(b"\1" * 16)

    seconds = []
    for _ in range(3):  # on a busy machine the same work takes more of a processor's time
        began = time.process_time()
        survey = survey_checkpoint(tmp_path)
        seconds.append(time.process_time() - began)

        assert len(survey.arrays) == 1000
    assert min(seconds) < 0.5


def test_a_large_directory_that_is_no_checkpoint_is_given_up_early(tmp_path: Path) -> None:
    for number in range(1100):
        (tmp_path / f"folder{number:04}").mkdir()
    seen: list[int] = []

    with pytest.raises(CheckpointNotFoundError) as caught:
        survey_checkpoint(tmp_path, lambda done, _: seen.append(done))

    assert str(caught.value) == (
        f"{tmp_path} is no checkpoint: expected metadata.json and common.pt, found neither, and no "
        "array or object in the first 1000 directories below it"
    )
    assert len(seen) <= 1001


def test_a_large_checkpoint_without_its_marker_is_looked_at_to_the_end(tmp_path: Path) -> None:
    for number in range(1100):
        (tmp_path / f"folder{number:04}").mkdir()
    write_metadata(tmp_path / "folder0500")

    survey = survey_checkpoint(tmp_path)

    assert [stored.array.key for stored in survey.arrays] == ["folder0500"]
