"""Objects are read with an allow-list only, are what was written, and land on the CPU."""

from __future__ import annotations

import collections
import io
import os
import pickle
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    StorageError,
    StrategyError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.formats.objects import (
    allowing,
    dump_object,
    load_pickle,
    object_ids,
    object_path,
    read_object,
    remove_object,
)
from tests.support.objects import write_object

NAME = ObjectId("rng_state", (0, 1), (2, 2))
PLAIN: dict[str, Any] = {
    "none": None,
    "numbers": [1, 2.5, 1 << 70, True, 1j],
    "text": ("ü", b"bytes"),
    "ordered": collections.OrderedDict(a=1),
    "tensor": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "dtype": torch.float32,
    "size": torch.Size((1, 2)),
}


DIRECTORY_ATTRIBUTE_OFFSET = 38


class Colour(Enum):
    RED = "red"


@dataclass
class Recipe:
    """A class that no list of ours allows."""

    steps: int


class RunsACommand:
    """Pickled as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, dict):
        return set(one) == set(other) and all(equal(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


# Written and read


def test_plain_objects_and_tensors_come_back(tmp_path: Path) -> None:
    nbytes = write_object(tmp_path, NAME, PLAIN)

    assert equal(read_object(tmp_path, NAME, ()), PLAIN)
    path = tmp_path / "rng_state" / "shard_0.1_2.2.pt"
    assert path.stat().st_size == nbytes
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("obj", "allowed"),
    [
        (Recipe(3), [Recipe]),
        (Colour.RED, [Colour]),
        (Fraction(1, 3), [Fraction]),
    ],
)
def test_a_class_is_read_once_it_is_allowed(
    obj: object, allowed: list[Any], tmp_path: Path
) -> None:
    write_object(tmp_path, NAME, obj)

    with pytest.raises(UnsafeObjectError):
        read_object(tmp_path, NAME, ())
    assert read_object(tmp_path, NAME, allowed) == obj
    with pytest.raises(UnsafeObjectError):  # the permission held for that call only
        read_object(tmp_path, NAME, ())


def test_a_class_that_the_file_does_not_name_is_no_damage_and_can_be_allowed(
    tmp_path: Path,
) -> None:
    parts = [np.arange(1).__reduce__()[0], np.ndarray, np.dtype]
    write_object(tmp_path, NAME, np.array([None, "a"], dtype=object))

    with pytest.raises(UnsafeObjectError, match=r"needs numpy\.dtypes\.ObjectDType, .*allow="):
        read_object(tmp_path, NAME, parts)
    found: Any = read_object(tmp_path, NAME, [*parts, np.dtypes.ObjectDType])
    assert found.tolist() == [None, "a"]


def test_an_object_that_cannot_be_pickled_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^rng_state/shard_0\.1_2\.2 cannot be saved"):
        write_object(tmp_path, NAME, lambda: 0)

    assert list(tmp_path.iterdir()) == []


# Names


def test_older_names_are_listed_with_the_shape_that_the_largest_offset_tells(
    tmp_path: Path,
) -> None:
    (tmp_path / "rng").mkdir()
    for row in range(2):
        for column in range(3):
            torch.save(None, tmp_path / "rng" / f"shard_{row}.{column}_2.pt")
    found = list(object_ids(tmp_path))

    assert found == [ObjectId("rng", (r, c), (2, 3)) for r in range(2) for c in range(3)]
    assert all(object_path(tmp_path, name).exists() for name in found)
    remove_object(tmp_path, found[0])
    assert len(list(object_ids(tmp_path))) == 5


def test_objects_are_listed_in_order_and_nothing_else_is(tmp_path: Path) -> None:
    names = [ObjectId("a", (n,), (11,)) for n in range(11)] + [ObjectId("b/c", (0,), (1,))]
    for name in reversed(names):
        write_object(tmp_path, name, None)
    torch.save({}, tmp_path / "common.pt")
    torch.save({}, tmp_path / "a" / "notes.pt")
    (tmp_path / "a" / ".partial-12").write_bytes(b"")
    (tmp_path / ".removed-w").mkdir()
    torch.save({}, tmp_path / ".removed-w" / "shard_0_1.pt")
    (tmp_path / "loop").symlink_to(tmp_path)

    assert list(object_ids(tmp_path)) == names


def test_removed_objects_leave_no_empty_directory_and_take_nothing_else(tmp_path: Path) -> None:
    names = [ObjectId("a/b", (n,), (2,)) for n in range(2)]
    for name in names:
        write_object(tmp_path, name, 1)
    (tmp_path / "a" / "array").mkdir()
    remove_object(tmp_path, names[0])

    assert list(object_ids(tmp_path)) == [names[1]]
    remove_object(tmp_path, names[1])
    assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "array").is_dir()


def may_be_read() -> bool:
    """Whether a Fraction may be unpickled at the moment."""
    content = dump_object(Fraction(1, 2), name="half")
    try:
        return bool(load_pickle(content, Path("half"), "half", ()) == Fraction(1, 2))
    except UnsafeObjectError:
        return False


def test_what_one_thread_allows_stays_allowed_while_another_leaves() -> None:
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with allowing([Fraction]):
            entered.set()
            assert may_leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    with allowing([Fraction]):
        may_leave.set()
        thread.join(60)
        assert may_be_read()
        with allowing([Fraction]):
            pass
        assert may_be_read()
    assert not may_be_read()


@pytest.mark.parametrize("wrong", ["os.system", 5, (Fraction,), (Fraction, 5), ["list"], None])
def test_what_is_no_class_cannot_be_allowed(wrong: Any) -> None:
    with pytest.raises(StrategyError, match="allow: expected classes"), allowing([wrong]):
        pytest.fail("it was allowed")


# Not trusted


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older form"])
def test_a_call_of_a_command_is_refused_by_name_and_never_made(
    zipped: bool, tmp_path: Path
) -> None:
    trace = tmp_path / "it ran"
    path = tmp_path / "rng_state" / "shard_0.1_2.2.pt"
    path.parent.mkdir()
    torch.save(RunsACommand(f"touch '{trace}'"), path, _use_new_zipfile_serialization=zipped)

    with pytest.raises(UnsafeObjectError) as caught:
        read_object(tmp_path, NAME, ())
    message = str(caught.value)
    assert "posix.system" in message
    assert "allow=" in message
    assert str(path) in message
    assert caught.value.key == "rng_state/shard_0.1_2.2"
    assert not trace.exists()


def test_every_class_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    write_object(tmp_path, NAME, [Recipe(1), Colour.RED, Fraction(1, 3)])

    with pytest.raises(UnsafeObjectError) as caught:
        read_object(tmp_path, NAME, ())
    for name in (f"{__name__}.Recipe", f"{__name__}.Colour", "fractions.Fraction"):
        assert name in str(caught.value)


def test_tensors_that_were_on_a_gpu_land_on_the_cpu(tmp_path: Path) -> None:
    content = saved_as_if_on("cuda:5", torch.arange(6.0))
    found = load_pickle(content, tmp_path / "x.pt", "x", ())

    assert found.device.type == "cpu"
    assert torch.equal(found, torch.arange(6.0))


def saved_as_if_on(device: str, tensor: torch.Tensor) -> bytes:
    """A ``.pt`` file in which the storage's device is another."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    changed = io.BytesIO()
    here = b"X\x03\x00\x00\x00cpu"
    there = b"X" + len(device).to_bytes(4, "little") + device.encode()
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(changed, "w") as target:
        for entry in source.infolist():
            target.writestr(entry, source.read(entry).replace(here, there))
    return changed.getvalue()


# Damaged


CONTENT = dump_object(PLAIN, name="x")


def load_or_error(content: bytes) -> Any:
    try:
        return load_pickle(content, Path("x.pt"), "x", ())
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("mask", [0x20, 0xFF])
def test_no_flipped_byte_changes_what_is_loaded(mask: int) -> None:
    """At any of its places: an error that says so, or (in names and padding) the same object."""
    for position in range(len(CONTENT)):
        damaged = bytearray(CONTENT)
        damaged[position] ^= mask
        found = load_or_error(bytes(damaged))
        if isinstance(found, CheckpointError):
            assert isinstance(found, CorruptCheckpointError), (position, found)
            assert str(found).startswith("x: x.pt is damaged"), (position, found)
        else:
            assert equal(found, PLAIN), position


def test_a_file_cut_short_anywhere_is_damaged() -> None:
    for size in range(0, len(CONTENT), 7):
        found = load_or_error(CONTENT[:size])
        assert isinstance(found, CorruptCheckpointError), (size, found)


@pytest.mark.parametrize(
    "content", [pickle.dumps({"c": 1}), b"\x80\x02" + b"(" * 100_000, b"\x80\x02]q\0(h\0l."]
)
def test_what_cannot_be_unpickled_is_damaged_without_advice_to_unpickle_it_freely(
    content: bytes,
) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^x: x\.pt is damaged: \w+") as caught:
        load_pickle(content, Path("x.pt"), "x", ())
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"P", b"PK", b"PK\x03\x04", b"\x80", b"\x80\x02", b"hello", b"\0" * 1000]
)
def test_what_is_no_file_of_torch_save_is_damaged(content: bytes) -> None:
    found = load_or_error(content)

    assert isinstance(found, CorruptCheckpointError)
    assert found.key == "x"
    assert found.path == "x.pt"


def test_a_record_marked_as_a_directory_is_found() -> None:
    """Torch takes it for empty, and returns uninitialised memory without an error."""
    marked = bytearray(CONTENT)
    marked[CONTENT.index(b"PK\1\2") + DIRECTORY_ATTRIBUTE_OFFSET] ^= 1 << 4

    assert "is not torch's" in str(load_or_error(bytes(marked)))


class Kind(Enum):
    """As it is now; it once had a 2."""

    GPT = 1


class FormerKind:
    """Pickled as the member that is gone."""

    def __reduce__(self) -> Any:
        return Kind, (2,)


def test_a_member_that_an_enum_has_lost_is_named_with_the_remedy(tmp_path: Path) -> None:
    write_object(tmp_path, NAME, {"args": FormerKind()})

    with pytest.raises(IncompatibleVersionError, match=r"Kind with the value 2.*Kind\._missing_"):
        read_object(tmp_path, NAME, [Kind])
