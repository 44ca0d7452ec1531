"""What is damaged is listed, and the rest converted and compared; equal digests need no read."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies import ConvertOptions, convert, copy, diff, upgrade
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    IncompleteCheckpointError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.formats.issues import Problem
from dist_ckpt_strategies.formats.rebuild import rebuild_index
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.tools.diff import Difference
from tests.cli.commands import json_of, run
from tests.support.checkpoints import contents, copied, flip_at, header_of
from tests.support.packs import IndexParts, with_index
from tests.support.thread_ranks import run_ranks
from tests.tools.all_formats import FORMATS

SMALL = ConvertOptions(max_memory_bytes=1, num_threads=2)
"""Blocks of 64 KiB."""

BROKEN, OTHER = "model.w", "model.v"


def state(value: float = 1.0) -> dict[str, Any]:
    tensors = {
        BROKEN: torch.full((512, 300), value),
        OTHER: torch.arange(40_000.0),
        "optimizer.state.fp32_param.w": torch.full((7, 9), 3.0),
        "other": torch.ones(3, dtype=torch.bfloat16),
    }
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()
    }
    values = {"model.o": {"t": torch.arange(9)}, "rng": [1, 2]}
    state |= {key: ShardedObject(key, held, (1,), (0,)) for key, held in values.items()}
    form = {"param_state_sharding_type": "fully_sharded_model_space"}
    return state | {"iteration": 7, "optimizer": form}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in each format; not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    dist_ckpt_strategies.save(state(), root / "pack")
    for name in FORMATS:
        if name != "pack":
            convert(root / "pack", root / name, name, options=SMALL)
    return root


def pack_with(root: Path, name: str) -> tuple[Path, int, int]:
    """The pack that holds a tensor, and the tensor's first and last byte there."""
    for path in root.glob("packs/*/*"):
        header, start = header_of(path)
        if name in header:
            first, end = header[name]["data_offsets"]
            return path, start + first, start + end - 1
    raise AssertionError(name)


def damage(root: Path, name: str) -> None:
    """Damage an array, an object and the common state, as far as the format notices that."""
    if name == "pack":
        path, first, last = pack_with(root, f"{BROKEN}@0.0")
        flip_at(path, first + 70, last)
        for tensor in ("rng#0", "__common__"):
            path, first, _ = pack_with(root, tensor)
            flip_at(path, first + 70)
        (root / "common.pt").unlink()
    elif name == "torch_dist":
        (path,) = root.glob("__0_0.distcp")
        at = path.read_bytes().index(bytes(torch.ones(100).numpy()))
        flip_at(path, at + 70)
        (path,) = root.glob("__0_1.distcp")
        flip_at(path, path.read_bytes().rindex(b"data.pkl") - 30)
        (root / "common.pt").unlink()
    else:
        os.truncate(root / BROKEN / ("c/0/0" if name == "zarr@3" else "0.0"), 100)
        flip_at(root / "rng" / "shard_0_1.pt", 70)
        flip_at(root / "common.pt", 70)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_damaged_is_left_out_and_listed(saved: Path, tmp_path: Path, name: str) -> None:
    source, target = copied(saved / name, tmp_path / "source"), tmp_path / "target"
    damage(source, name)
    before = contents(source)
    with pytest.raises(StorageError):
        convert(source, target, "pack", options=SMALL)

    reports = run_ranks(
        2,
        lambda comm: convert(source, target, "pack", skip_damaged=True, options=SMALL, comm=comm),
    )

    assert contents(source) == before
    report = reports[0]
    assert [one.missing for one in reports] == [report.missing] * 2
    texts: dict[str, list[str]] = {}
    for one in report.missing:
        texts.setdefault(one.key, []).append(one.why)
    assert texts.keys() == {BROKEN, "rng/shard_0_1", "common.pt"}, texts
    assert all(str(source) in text for some in texts.values() for text in some)
    if name == "pack":
        assert [("rank 0" in text, "bytes" in text) for text in texts[BROKEN]] == [(True, True)] * 2
    opened = dist_ckpt_strategies.open(target)
    assert sorted(opened) == sorted(
        state().keys() & set(dist_ckpt_strategies.open(saved / name)) - {BROKEN}
    )
    assert [*opened.objects] == ["model.o/shard_0_1"]
    assert opened.common == {}
    found = diff(saved / name, target)
    assert {(one.key, one.difference.value) for one in found.arrays} == {(BROKEN, "only_in_a")}
    assert run("verify", target).exit_code == 0


def test_the_copy_of_the_common_state_is_used(saved: Path, tmp_path: Path) -> None:
    source = copied(saved / "pack", tmp_path / "source")
    path, first, _ = pack_with(source, "__common__")
    flip_at(path, first + 70)

    assert convert(source, tmp_path / "target", "zarr@1", skip_damaged=True).missing == ()
    assert dist_ckpt_strategies.open(tmp_path / "target").common["iteration"] == 7


def test_a_pack_that_is_gone_takes_its_arrays_along(saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    convert(saved / "pack", source, "pack", options=ConvertOptions(max_file_bytes=1000))
    path, *_ = pack_with(source, f"{OTHER}@0")
    path.unlink()

    result = run("convert", source, tmp_path / "t", "--to", "pack", "--skip-damaged")
    found = json_of("convert", source, tmp_path / "u", "--to", "zarr@3", "--skip-damaged", code=1)

    assert result.exit_code == 1
    assert f"left out: {OTHER}: {path} does not exist" in result.stdout
    assert [one["key"] for one in found["missing"]] == [OTHER]
    assert (found["num_arrays"], found["num_objects"]) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("zarr@1", ".zarray"), ("zarr@3", "zarr.json")])
@pytest.mark.parametrize("keys", [None, "model.*"])
def test_an_array_whose_description_is_gone_is_not_passed_over(
    saved: Path, tmp_path: Path, keys: str | None, kind: str, name: str
) -> None:
    source = copied(saved / kind, tmp_path / "source")
    (source / BROKEN / name).unlink()

    with pytest.raises(IncompleteCheckpointError, match=f"{source}/{BROKEN}/{name}"):
        convert(source, tmp_path / "target", "pack", keys=keys)

    assert copy(source, tmp_path / "copy", keys="other").num_arrays == 1
    report = convert(source, tmp_path / "target", "pack", keys=keys, skip_damaged=True)
    assert [one.key for one in report.missing] == [BROKEN]
    assert OTHER in dist_ckpt_strategies.open(tmp_path / "target")


@pytest.mark.slow
def test_verify_compares_every_byte_of_the_files_beside_the_packs(
    two_saved: Path, tmp_path: Path
) -> None:
    root = copied(two_saved, tmp_path / "source")
    (full_index,) = root.glob("saves/*/index")
    for path in (root / "index", full_index, root / "metadata.json"):
        for at in range(path.stat().st_size):
            flip_at(path, at)
            assert verify(scan(root)), (path, at)
            flip_at(path, at)
        content = path.read_bytes()
        path.unlink()
        assert verify(scan(root)), path
        path.write_bytes(content)
    assert verify(scan(root)) == ()


def test_the_common_states_copy_comes_after_the_index(two_saved: Path, tmp_path: Path) -> None:
    root = copied(two_saved, tmp_path / "source")
    common = root / "common.pt"
    whole = common.read_bytes()
    for earlier in (b"", whole[::-1]):
        common.write_bytes(earlier)
        save = threading.Timer(0.2, common.write_bytes, [whole])
        save.start()
        assert verify(scan(root)) == ()
        save.join()

    common.write_bytes(whole[:-1])
    (issue,) = scan(root).issues
    assert (issue.problem, issue.path) == (Problem.WRONG_SIZE, "common.pt")


def test_verify_names_array_range_file_and_rank(saved: Path, tmp_path: Path) -> None:
    for number, damaged in enumerate(("range", "header", "size", "gone")):
        root = tmp_path / str(number)
        convert(saved / "pack", root, "pack", options=ConvertOptions(max_file_bytes=1000))
        path, first, _ = pack_with(root, f"{OTHER}@0")
        if damaged == "range":
            flip_at(path, first + 70)
        elif damaged == "header":
            flip_at(path, 100)
        elif damaged == "size":
            os.truncate(path, first)
        else:
            path.unlink()
        (issue,) = json_of("verify", root, code=1)["issues"]
        assert issue["path"] == str(path.relative_to(root))
        assert "written by rank 0" in issue["expected"]
        if damaged == "range":
            assert issue["key"] == OTHER
            assert issue["expected"].startswith(f"[0:40000], written by rank 0: bytes {first} to ")
        else:
            assert issue["expected"].endswith(f", with blocks of {OTHER}")


# diff


def test_blocks_with_equal_digests_are_not_read_and_others_are(saved: Path, tmp_path: Path) -> None:
    one, other = copied(saved / "pack", tmp_path / "one"), tmp_path / "other"
    copy(one, other)
    for root in (one, other):
        path, first, _ = pack_with(root, f"{OTHER}@0")
        flip_at(path, first)
    assert diff(one, other).is_equal
    assert run("verify", one).exit_code == 1

    dist_ckpt_strategies.save(state(2.0), tmp_path / "changed")
    (found,) = diff(one, tmp_path / "changed").arrays
    assert (found.key, found.index, found.num_differing) == (BROKEN, (0, 0), 512 * 300)
    assert (found.a, found.b) == ("1.0", "2.0")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_comparison_goes_on_over_damage(saved: Path, tmp_path: Path, name: str) -> None:
    broken, changed = copied(saved / name, tmp_path / "broken"), tmp_path / "changed"
    damage(broken, name)
    dist_ckpt_strategies.save(state() | {"iteration": 8}, tmp_path / "saved")
    convert(tmp_path / "saved", changed, "zarr@1")
    (changed / "other" / "0").write_bytes(b"\1" * 6)

    for sides in ((broken, changed), (changed, broken)):
        report = diff(*sides, options=SMALL)
        kinds = {(one.key, one.difference) for one in report.arrays}
        assert kinds == {(BROKEN, Difference.DAMAGED), ("other", Difference.VALUES)}
        (damaged,) = (one for one in report.arrays if one.key == BROKEN)
        texts = (damaged.a, damaged.b) if sides[0] is broken else (damaged.b, damaged.a)
        assert str(broken) in texts[0]
        assert texts[1] == ""
        of_objects = {(one.key, one.difference) for one in report.objects}
        assert of_objects == {(key, Difference.DAMAGED) for key in ("rng/shard_0_1", "common.pt")}
    result = run("diff", broken, changed)
    assert result.exit_code == 1
    assert f"{BROKEN}: damaged in the first: {BROKEN}" in result.stdout


def test_an_upgraded_checkpoint_equals_the_old_one(saved: Path, tmp_path: Path) -> None:
    old, new = saved / "zarr@1", tmp_path / "new"
    upgrade(old, new, "pack")
    for sides in ((old, new), (new, old), (saved / "pack", new)):
        report = diff(*sides)
        assert report.is_equal, report
        assert (report.num_arrays, report.num_renamed) == (4, 1)
    assert "4 arrays" in run("diff", old, new).stdout
    assert "; 1 as `upgrade` renames them" in run("diff", old, new).stdout
    assert not diff(old, new, keys="*param.w").arrays
    changed = tmp_path / "changed"
    convert(new, changed, "zarr@1")
    (changed / "optimizer.state.param.w" / "0.0").write_bytes(bytes(7 * 9 * 4))
    (found,) = diff(old, changed).arrays
    assert (found.key, found.num_differing) == ("optimizer.state.fp32_param.w", 63)


def test_keys_of_which_an_upgrade_would_make_one_are_refused(tmp_path: Path) -> None:
    twin = ShardedTensor.from_rank_offsets("optimizer.state.param.w", torch.ones(2))
    dist_ckpt_strategies.save(state() | {"twin": twin}, tmp_path / "old", ("zarr", 1))

    with pytest.raises(PlanError, match=r"param\.w: two arrays of the source would have this key"):
        upgrade(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# copy


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_part_is_copied_in_the_format_of_the_source(
    saved: Path, tmp_path: Path, name: str
) -> None:
    report = copy(saved / name, tmp_path / "part", keys="model.*", options=SMALL)

    opened = dist_ckpt_strategies.open(tmp_path / "part")
    assert opened.format == dist_ckpt_strategies.open(saved / name).format
    assert list(opened) == [OTHER, BROKEN]
    assert list(opened.objects) == ["model.o/shard_0_1"]
    assert opened.common["iteration"] == 7
    assert (report.num_arrays, report.num_objects) == (2, 1)
    assert diff(saved / name, tmp_path / "part", keys="model.*").is_equal
    with pytest.raises(ArrayNotFoundError, match="whose key matches 'modle"):
        copy(saved / name, tmp_path / "none", keys="modle.*")


def test_digests_are_copied_and_compared_with_what_is_read(saved: Path, tmp_path: Path) -> None:
    source = copied(saved / "pack", tmp_path / "source")
    path, first, _ = pack_with(source, f"{BROKEN}@0.0")
    flip_at(path, first + 300_000)

    with pytest.raises(StorageError, match=rf"{BROKEN}: {path}, written by rank 0, is damaged"):
        copy(source, tmp_path / "all")
    result = run("copy", source, tmp_path / "part", "--keys", OTHER)
    assert result.exit_code == 0, result.stderr
    assert run("verify", tmp_path / "part").exit_code == 0
    assert (tmp_path / "part" / "common.pt").stat().st_mtime <= time.time()


def row_of(parts: IndexParts, key: str, number: int) -> Any:
    """The row of a block, as it stands in the index: a view."""
    rows = [n for n, row in enumerate(parts.rows) if parts.keys[row[0]] == key]
    return parts.rows[rows[number]]


def column(number: int, value: int, key: str = "cut") -> Callable[[IndexParts], None]:
    """Another number in the row of the second block of a key, which has two dims."""

    def change(parts: IndexParts) -> None:
        row_of(parts, key, 1)[number] = value

    return change


def described(dtype: Any = "float32", shape: Any = (8, 6)) -> Callable[[IndexParts], None]:
    def change(parts: IndexParts) -> None:
        parts.of_key[parts.keys.index("cut")] = len(parts.kinds)
        parts.kinds.append([dtype, shape])

    return change


def without_a_block(parts: IndexParts) -> None:
    parts.rows = np.delete(parts.rows, np.flatnonzero(parts.rows[:, 0] == 0)[1], axis=0)


def swapped(parts: IndexParts) -> None:
    """Each of two blocks where the other is, which only the pack tells."""
    one, other = (row_of(parts, "cut", n) for n in range(2))
    one[5:], other[5:] = other[5:].copy(), one[5:].copy()


def of_root(name: str, value: Any) -> Callable[[IndexParts], None]:
    return lambda parts: parts.root.__setitem__(name, value)


def of_object(number: int, value: Any) -> Callable[[IndexParts], None]:
    return lambda parts: parts.objects[0].__setitem__(number, value)


HUGE = 1 << 62
FORGED: dict[str, Callable[[IndexParts], Any]] = {
    "a gap and an overlap of one size": column(1, 3),
    "an origin before the array": column(1, -1),
    "an origin beyond it": column(1, HUGE),
    "a shorter block": column(3, 3),
    "a block of negative size": column(3, -4),
    "a block of huge size": column(3, HUGE),
    "no block": without_a_block,
    "a block of no array": column(0, 99),
    "a block of another array": column(0, 1),
    "no such pack": column(5, 7),
    "a pack before the first": column(5, -1),
    "bytes before the first": column(6, -96),
    "bytes beyond the last": column(6, HUGE),
    "no such digest": column(7, HUGE),
    "blocks in another order": lambda parts: parts.rows[:2].__setitem__(..., parts.rows[1::-1]),
    "no dtype": described("float7"),
    "a larger dtype": described("float64"),
    "another shape": described(shape=[9, 6]),
    "a huge shape": described(shape=[1 << 70, 6]),
    "a negative shape": described(shape=[-8, 6]),
    "a shape of more dims": described(shape=[8, 6, 1]),
    "no shape": described(shape=None),
    "a key twice": lambda parts: parts.keys.__setitem__(1, "cut"),
    "a key that is a number": lambda parts: parts.keys.__setitem__(0, 1),
    "no field": lambda parts: parts.root.pop("common"),
    "too many packs": of_root("num_packs", 1 << 70),
    "no list of packs": of_root("packs", []),
    "no list of arrays": of_root("arrays", 5),
    "a huge segment": lambda parts: parts.root["arrays"].append(["z", 1, None, 0, HUGE, ""]),
    "a common state of huge size": of_root("common", [0, 0, 0, HUGE]),
    "a common state without digests": of_root("common", [0, 0, HUGE, 5]),
    "an object in no pack": of_object(3, 9),
    "an object of huge size": of_object(6, HUGE),
    "an object without digests": of_object(5, HUGE),
    "an object of no place": of_object(1, None),
    "cut records of packs": lambda parts: parts.packs.pop(),
    "a pack of huge size": lambda parts: parts.packs.__setitem__(slice(24, 32), b"\xff" * 8),
    "a pack of too many digests": lambda parts: parts.packs.__setitem__(slice(36, 40), b"\xff" * 4),
}


def two_blocks() -> dict[str, Any]:
    values: Any = torch.arange(48.0).reshape(8, 6)
    tensors: dict[str, Any] = {
        str(n): ShardedTensor.from_rank_offsets("cut", values[4 * n : 4 * n + 4], (0, n, 2))
        for n in range(2)
    }
    tensors["v"] = ShardedTensor.from_rank_offsets("other", values[:4].clone())
    return tensors | {"o": ShardedObject("o", {"n": 1}, (1,), (0,)), "iteration": 7}


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of these; not to be changed."""
    root = tmp_path_factory.mktemp("two") / "c"
    dist_ckpt_strategies.save(two_blocks(), root)
    return root


def test_a_segment_of_one_array_tells_the_box_around_its_blocks(tmp_path: Path) -> None:
    tensors = two_blocks()
    boxes: list[Any] = []
    for name, kept in {"one array": "01o", "two arrays": "01vo"}.items():
        dist_ckpt_strategies.save({key: tensors[key] for key in kept}, tmp_path / name)
        with_index(tmp_path / name, lambda parts: boxes.append(parts.root["arrays"][0][2]))
    assert boxes == [[[0, 0], [8, 6]], None]


def read_all(root: Path) -> None:
    """Read all that ``two_blocks`` has saved: it is what was saved, or an error."""
    opened = dist_ckpt_strategies.open(root)
    saved = torch.arange(48.0).reshape(8, 6).numpy()
    assert np.array_equal(opened["cut"][...], saved)
    assert np.array_equal(opened["other"][...], saved[:4])
    assert (opened.objects["o/shard_0_1"], opened.common) == ({"n": 1}, {"iteration": 7})


def load_all(root: Path) -> None:
    wanted = two_blocks()
    for value in wanted.values():
        if isinstance(value, ShardedTensor):
            value.data = torch.zeros_like(value.data)
    found: Any = dist_ckpt_strategies.load(wanted, root)
    assert torch.equal(torch.cat([found["0"], found["1"]]), torch.arange(48.0).reshape(8, 6))
    assert (found["o"], found["iteration"]) == ({"n": 1}, 7)


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
@pytest.mark.slow
def test_an_index_that_a_writer_got_wrong_is_an_error_and_no_value(
    change: Callable[[IndexParts], Any], two_saved: Path, tmp_path: Path
) -> None:
    root = with_index(copied(two_saved, tmp_path / "c"), change)
    acts: dict[str, Callable[[], Any]] = {
        "open": partial(read_all, root),
        "load": partial(load_all, root),
        "copy": partial(copy, root, tmp_path / "copy"),
    }
    for name, act in acts.items():
        with pytest.raises(StorageError) as caught:
            act()
        assert str(root) in caught.value.message, name
    verified = run("verify", root)
    assert verified.exit_code in {1, 3}
    assert "unexpected" not in verified.output + run("inspect", root).output
    assert rebuild_index(root, force=True) is not None
    read_all(root)


def test_verify_compares_the_index_with_the_packs(tmp_path: Path) -> None:
    for number, change in enumerate((swapped, described("int32"))):
        dist_ckpt_strategies.save(two_blocks(), tmp_path / str(number))
        root = with_index(tmp_path / str(number), change)
        found = verify(scan(root))
        assert {issue.key for issue in found} == {"cut"}, found
        assert all("as the index says" in issue.expected for issue in found)
